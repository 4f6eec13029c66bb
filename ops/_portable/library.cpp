// The functions that every portable library exports: its table, a call, the text of a failure, and owners let go.
#include <atomic>
#include <climits>
#include <mutex>

#include "dsops/table.h"

#define DSOPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
struct Entry {
    std::string name, signature;
    void (*function)();
    dsops::Enter enter;
};

// Filled by static initialisers of other files, and used by static destructors' threads: made at first use, never freed.
std::vector<Entry>& table()
{
    static auto* entries = new std::vector<Entry>;
    return *entries;
}

struct Released {
    std::mutex lock;
    std::vector<uint64_t> tokens;
    std::atomic<int64_t> count{0};
};
Released& released()
{
    static auto* instance = new Released;
    return *instance;
}

struct Owner {
    uint64_t token;
    explicit Owner(uint64_t value) : token(value) {}
    Owner(const Owner&) = delete;
    ~Owner()
    {
        std::lock_guard<std::mutex> guard(released().lock);
        released().tokens.push_back(token);
        released().count.store(int64_t(released().tokens.size()), std::memory_order_release);
    }
};

// A failure's text: its first letter is the kind, and "" says that there was none.
thread_local std::string failure, taken;
}  // namespace

void dsops::add(const char* name, std::string signature, void (*function)(), Enter enter)
{
    table().push_back({name, std::move(signature), function, enter});
}

int64_t dsops::fail(char kind, const char* what) noexcept
{
    try {
        failure.assign(1, kind).append(what ? what : "");
    } catch (...) {
        failure.assign(1, 'M');  // fits into the string itself
    }
    return INT64_MIN;
}

std::shared_ptr<void> dsops::owner(uint64_t token) { return std::make_shared<Owner>(token); }

DSOPS_EXPORT int64_t dsops_abi() { return 1; }
DSOPS_EXPORT int64_t dsops_count() { return int64_t(table().size()); }
DSOPS_EXPORT const char* dsops_name(int64_t index) { return table().at(size_t(index)).name.c_str(); }
DSOPS_EXPORT const char* dsops_signature(int64_t index) { return table().at(size_t(index)).signature.c_str(); }
DSOPS_EXPORT const void* dsops_entry(int64_t index) { return &table().at(size_t(index)); }

// INT64_MIN may be a failure; dsops_failure tells.
DSOPS_EXPORT int64_t dsops_call(const void* entry, const dsops::Slot* slots)
{
    const auto* called = static_cast<const Entry*>(entry);
    return called->enter(called->function, slots);
}

DSOPS_EXPORT const char* dsops_failure()
{
    taken.swap(failure);
    failure.clear();
    return taken.c_str();
}

// Writes up to `room` tokens of tensors that no C++ object holds any longer, and returns how many.
DSOPS_EXPORT int64_t dsops_released(uint64_t* tokens, int64_t room)
{
    if (released().count.load(std::memory_order_acquire) == 0) return 0;
    std::lock_guard<std::mutex> guard(released().lock);
    auto& waiting = released().tokens;
    int64_t written = 0;
    for (; written < room && !waiting.empty(); ++written) {
        tokens[written] = waiting.back();
        waiting.pop_back();
    }
    released().count.store(int64_t(waiting.size()), std::memory_order_release);
    return written;
}
