// The OpenMP runtime: which one another library of this process uses, and calls that are handed on to it.
//
// The kernels are compiled with -fopenmp and linked with no runtime, so that there is never a second thread pool. The
// functions that gcc calls for `omp parallel for` (libgomp's manual, "The libgomp ABI") are here, and go to the runtime
// that was bound; until one is, a parallel region runs on the calling thread alone.
#include <elf.h>
#include <link.h>

#include <cstring>
#include <string>

#define DSOPS_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Ask = int (*)();

void on_this_thread(void (*body)(void*), void* data, unsigned, unsigned) { body(data); }
int one_thread() { return 1; }
int first_thread() { return 0; }

Parallel parallel = on_this_thread;
Ask num_threads = one_thread;
Ask thread_num = first_thread;

// Any of these, where a library calls it, tells its runtime: all three runtimes (libgomp, libiomp5, libomp) define them.
const char* const kTelling[] = {"GOMP_parallel", "omp_get_max_threads", "omp_get_num_threads", "omp_get_thread_num",
                                "omp_set_num_threads", "omp_in_parallel", "__kmpc_fork_call"};

struct Search {
    const char* library;     // the file name of the library that is asked
    ElfW(Addr) function = 0; // what one of kTelling is bound to in it
    std::string runtime;     // the file that has this function
};

bool is_telling(const char* name)
{
    for (const char* known : kTelling)
        if (std::strcmp(name, known) == 0) return true;
    return false;
}

bool contains(const dl_phdr_info& object, ElfW(Addr) address)
{
    for (int i = 0; i < object.dlpi_phnum; ++i) {
        const ElfW(Phdr)& part = object.dlpi_phdr[i];
        const ElfW(Addr) start = object.dlpi_addr + part.p_vaddr;
        if (part.p_type == PT_LOAD && start <= address && address - start < part.p_memsz) return true;
    }
    return false;
}

// The dynamic section's tables hold addresses, which the dynamic loader of glibc has relocated (elf/get-dynamic-info.h).
ElfW(Addr) bound_function(const dl_phdr_info& object)
{
    const ElfW(Dyn)* dynamic = nullptr;
    for (int i = 0; i < object.dlpi_phnum; ++i)
        if (object.dlpi_phdr[i].p_type == PT_DYNAMIC)
            dynamic = reinterpret_cast<const ElfW(Dyn)*>(object.dlpi_addr + object.dlpi_phdr[i].p_vaddr);
    if (dynamic == nullptr) return 0;
    const char* strings = nullptr;
    const ElfW(Sym)* symbols = nullptr;
    const ElfW(Rela)* relocations[2] = {nullptr, nullptr};
    size_t sizes[2] = {0, 0};
    for (; dynamic->d_tag != DT_NULL; ++dynamic) {
        const auto value = dynamic->d_un.d_ptr;
        if (dynamic->d_tag == DT_STRTAB) strings = reinterpret_cast<const char*>(value);
        if (dynamic->d_tag == DT_SYMTAB) symbols = reinterpret_cast<const ElfW(Sym)*>(value);
        if (dynamic->d_tag == DT_JMPREL) relocations[0] = reinterpret_cast<const ElfW(Rela)*>(value);
        if (dynamic->d_tag == DT_PLTRELSZ) sizes[0] = size_t(value) / sizeof(ElfW(Rela));
        if (dynamic->d_tag == DT_RELA) relocations[1] = reinterpret_cast<const ElfW(Rela)*>(value);
        if (dynamic->d_tag == DT_RELASZ) sizes[1] = size_t(value) / sizeof(ElfW(Rela));
    }
    if (strings == nullptr || symbols == nullptr) return 0;
    ElfW(Addr) own = 0;
    for (int table = 0; table < 2; ++table)
        for (size_t i = 0; relocations[table] != nullptr && i < sizes[table]; ++i) {
            const ElfW(Rela)& one = relocations[table][i];
            const ElfW(Sym)& symbol = symbols[ELF64_R_SYM(one.r_info)];
            if (symbol.st_shndx != SHN_UNDEF || !is_telling(strings + symbol.st_name)) continue;
            ElfW(Addr) target;
            std::memcpy(&target, reinterpret_cast<const void*>(object.dlpi_addr + one.r_offset), sizeof target);
            if (target == 0) continue;  // a weak symbol that nobody defines
            if (!contains(object, target)) return target;
            own = target;  // its PLT, as long as it was bound lazily and not called
        }
    return own;
}

int find_library(dl_phdr_info* object, size_t, void* data)
{
    auto& search = *static_cast<Search*>(data);
    const char* slash = std::strrchr(object->dlpi_name, '/');
    if (std::strcmp(slash ? slash + 1 : object->dlpi_name, search.library) != 0) return 0;
    search.function = bound_function(*object);
    return 1;
}

int find_runtime(dl_phdr_info* object, size_t, void* data)
{
    auto& search = *static_cast<Search*>(data);
    if (!contains(*object, search.function)) return 0;
    search.runtime = object->dlpi_name;
    return 1;
}

thread_local std::string answer;

}  // namespace

// The path of the OpenMP runtime that a loaded library is bound to, by the library's file name; "" when there is none.
// Its own path for a library that is bound lazily and has not called its runtime yet.
DSOPS_EXPORT const char* dsops_openmp_of(const char* library)
{
    Search search{library};
    dl_iterate_phdr(find_library, &search);
    if (search.function != 0) dl_iterate_phdr(find_runtime, &search);
    answer.swap(search.runtime);
    return answer.c_str();
}

// From a runtime: GOMP_parallel, omp_get_num_threads, omp_get_thread_num.
DSOPS_EXPORT void dsops_bind_openmp(Parallel run, Ask count, Ask number)
{
    parallel = run;
    num_threads = count;
    thread_num = number;
}

extern "C" {
__attribute__((visibility("hidden"))) void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags)
{
    parallel(body, data, threads, flags);
}
__attribute__((visibility("hidden"))) int omp_get_num_threads() { return num_threads(); }
__attribute__((visibility("hidden"))) int omp_get_thread_num() { return thread_num(); }
}
