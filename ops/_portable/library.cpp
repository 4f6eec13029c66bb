// The functions that every portable library exports: its table, a call, the text of a failure, and owners let go.
#include <atomic>
#include <climits>
#include <mutex>
#include <set>

#include "dsops/table.h"

#define DSOPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {
// What a function does with the optimizer whose id is its first argument. The sources follow a null pointer where there
// is none, so a step is refused here, under the GIL, where no other thread can destroy the optimizer in between.
enum class Role { none, creates, destroys, needs };

Role role_of(const std::string& name)
{
    if (name.rfind("create_", 0) == 0) return Role::creates;
    if (name.rfind("destroy_", 0) == 0) return Role::destroys;
    const bool steps = name == "adam_update" || name == "adagrad_update" || name == "lion_update";
    return steps || name == "zenflow_adam_create" ? Role::needs : Role::none;
}

struct Entry {
    std::string name, signature;
    void (*function)();
    dsops::Enter enter;
    Role role;
};

// Filled by static initialisers of other files, and used by static destructors' threads: made at first use, never freed.
std::vector<Entry>& table()
{
    static auto* entries = new std::vector<Entry>;
    return *entries;
}

std::set<int32_t>& optimizers()
{
    static auto* ids = new std::set<int32_t>;
    return *ids;
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
    table().push_back({name, std::move(signature), function, enter, role_of(name)});
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

std::shared_ptr<void> dsops::owner(uint64_t token) { return token ? std::make_shared<Owner>(token) : nullptr; }

DSOPS_EXPORT int64_t dsops_abi() { return 1; }
DSOPS_EXPORT int64_t dsops_count() { return int64_t(table().size()); }
DSOPS_EXPORT const char* dsops_name(int64_t index) { return table().at(size_t(index)).name.c_str(); }
DSOPS_EXPORT const char* dsops_signature(int64_t index) { return table().at(size_t(index)).signature.c_str(); }
DSOPS_EXPORT const void* dsops_entry(int64_t index) { return &table().at(size_t(index)); }

// The first slot holds the entry. INT64_MIN may be a failure; dsops_failure tells.
DSOPS_EXPORT int64_t dsops_call(const dsops::Slot* slots)
{
    const auto& entry = *static_cast<const Entry*>(slots->data);
    ++slots;
    if (entry.role == Role::none) return entry.enter(entry.function, slots);
    const auto id = int32_t(slots->number);
    if (entry.role == Role::needs && optimizers().count(id) == 0)
        return dsops::fail('V', (entry.name + ": there is no optimizer " + std::to_string(id) +
                                 "; it was not created, or it was destroyed").c_str());
    const auto result = entry.enter(entry.function, slots);
    if (entry.role == Role::creates && result == 0) optimizers().insert(id);
    if (entry.role == Role::destroys) optimizers().erase(id);
    return result;
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
