/* Runs a portable library of cpu_adam as dsops_prebuilt.portable does, with neither Python nor torch: for emulators.
 *
 *     portable_driver LIBRARY INPUT OUTPUT PARAMS STATES STEPS
 *
 * INPUT has four tensors of one length behind each other: params and grads of the scalar type PARAMS, exp_avg and
 * exp_avg_sq of STATES (torch's numbers: 5 float16, 6 float32, 15 bfloat16). OUTPUT gets params, exp_avg and exp_avg_sq
 * after STEPS steps of AdamW on the same gradients. Exit codes: 2 for the command line, the library or a file, 3 for a
 * call that failed. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* As in dsops/table.h. */
typedef union {
    int64_t number;
    double real;
    void *data;
    const void *entry;
} Slot;

static int64_t (*abi)(void), (*count)(void), (*call)(const Slot *);
static const char *(*name_of)(int64_t), *(*signature_of)(int64_t), *(*failure)(void);
static const void *(*entry_of)(int64_t);

static void stop(int code, const char *what, const char *why)
{
    fprintf(stderr, "%s: %s\n", what, why);
    exit(code);
}

static void *exported(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL) stop(2, name, "is not exported");
    return found;
}

static void open_library(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) stop(2, path, dlerror());
    *(void **)&abi = exported(library, "dsops_abi");
    *(void **)&count = exported(library, "dsops_count");
    *(void **)&name_of = exported(library, "dsops_name");
    *(void **)&signature_of = exported(library, "dsops_signature");
    *(void **)&entry_of = exported(library, "dsops_entry");
    *(void **)&call = exported(library, "dsops_call");
    *(void **)&failure = exported(library, "dsops_failure");
    if (abi() != 1) stop(2, path, "has another C ABI");
}

static const void *entry(const char *name, const char *signature)
{
    for (int64_t i = 0; i < count(); ++i) {
        if (strcmp(name_of(i), name) != 0) continue;
        if (strcmp(signature_of(i), signature) != 0) stop(2, name, signature_of(i));
        return entry_of(i);
    }
    stop(2, name, "is not in the table");
    return NULL;
}

/* slots[0] holds the entry, the arguments follow. */
static void enter(const char *name, const Slot *slots)
{
    call(slots);
    const char *text = failure();
    if (text[0] != '\0') stop(3, name, text);
}

static int width(int type)
{
    if (type != 5 && type != 6 && type != 15) stop(2, "scalar type", "is not 5, 6 or 15");
    return type == 6 ? 4 : 2;
}

static int64_t size_of(FILE *file)
{
    fseek(file, 0, SEEK_END);
    const int64_t size = ftell(file);
    rewind(file);
    return size;
}

int main(int argc, char **argv)
{
    if (argc != 7) stop(2, "usage", "portable_driver LIBRARY INPUT OUTPUT PARAMS STATES STEPS");
    const int types[4] = {atoi(argv[4]), atoi(argv[4]), atoi(argv[5]), atoi(argv[5])};
    open_library(argv[1]);

    FILE *input = fopen(argv[2], "rb");
    if (input == NULL) stop(2, argv[2], "cannot be opened");
    const int64_t elements = size_of(input) / (2 * width(types[0]) + 2 * width(types[2]));
    void *tensors[4];
    for (int i = 0; i < 4; ++i) {
        /* torch aligns to 64 bytes (c10/core/alignment.h), and the kernels' stores of float16 rely on 16 or 32. */
        const size_t bytes = (size_t)elements * width(types[i]);
        tensors[i] = aligned_alloc(64, (bytes + 63) / 64 * 64);
        if (tensors[i] == NULL || fread(tensors[i], 1, bytes, input) != bytes) stop(2, argv[2], "cannot be read");
    }
    fclose(input);

    /* The entry, then: optimizer_id, alpha, betta1, betta2, eps, weight_decay, adamw_mode, should_log. */
    const Slot create[] = {{.entry = entry("create_adam", "ifffff?" "?>i")}, {.number = 0},
                           {.real = 0.02}, {.real = 0.9}, {.real = 0.95}, {.real = 1e-8}, {.real = 0.1},
                           {.number = 1}, {.number = 0}};
    enter("create_adam", create);

    /* The entry, then: optimizer_id, step, lr, beta1, beta2, epsilon, weight_decay, bias_correction, and for each tensor
     * its address, and its number of elements with the scalar type in the highest byte. */
    Slot update[9 + 4 * 2] = {{.entry = entry("adam_update", "iQfffff?rrrr>i")}, {.number = 0}, {.number = 0},
                              {.real = 0.02}, {.real = 0.9}, {.real = 0.95}, {.real = 1e-8}, {.real = 0.1},
                              {.number = 1}};
    for (int i = 0; i < 4; ++i) {
        update[9 + 2 * i].data = tensors[i];
        update[10 + 2 * i].number = elements | (int64_t)types[i] << 56;
    }
    const int steps = atoi(argv[6]);
    for (int step = 1; step <= steps; ++step) {
        update[2].number = step;
        enter("adam_update", update);
    }

    FILE *output = fopen(argv[3], "wb");
    if (output == NULL) stop(2, argv[3], "cannot be opened");
    const int written[] = {0, 2, 3};
    for (int i = 0; i < 3; ++i) {
        const int tensor = written[i];
        fwrite(tensors[tensor], (size_t)width(types[tensor]), (size_t)elements, output);
    }
    if (fclose(output) != 0) stop(2, argv[3], "cannot be written");
    return 0;
}
