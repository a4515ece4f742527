/* SPDX-License-Identifier: GPL-2.0 */
/*
 * One rank of a training job: step after step an input copied to the GPU, launches, two all-reduces among them, and a result
 * copied back, which waits for all ranks; then a rest. With --fault, 5 in 100 of its steps, after CLEAN_STEPS,, are late
 * Each rank works on a GPU of its own (CUDA_VISIBLE_DEVICES).
 *
 * --rank R --ranks N --id TEXT   which rank of which communicator
 *
 * Faults, each before the first all-reduce unless said otherwise:
 *         copy       a large copy out of pageable memory, which holds up the host
 *         pinned     a large copy out of pinned memory, which only holds up the GPU
 *         work       eight times the launches
 *         larger     kernels five times as large
 *         sleep      the thread sleeps
 *         idle       a large copy between two steps, while all rest: nobody waits for it
 *         shift      from half of the run on the thread sleeps a little in every step
 */
#include "common.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define CLEAN_STEPS 200
#define STEPS_PER_S 180 /* about as many as there is time for */
#define FAULT_SHARE 0.05
#define LAUNCHES 24
#define KERNEL_NS 60000
#define BLOCKS 264 /* a quarter of what fills the GPU */
#define INPUT_BYTES (1 << 20)
#define OUTPUT_BYTES (8 << 10)
#define GRADIENTS (1 << 20) /* floats in an all-reduce */
#define LARGE_BYTES (64 << 20)
#define REST (2 * MS)
#define LONG_REST (14 * MS)

struct unique_id {
	char bytes[128];
};

static struct options options;
static handle stream, kernel, comm;
static uint64_t device_memory;
static char *input, *output, *large, *pinned;
static int (*init_rank)(handle *comm, int ranks, struct unique_id id, int rank);
static int (*all_reduce)(const void *from, void *to, size_t count, int type, int op, handle comm, handle stream);

static void *nccl(const char *name)
{
	static void *library;
	void *function;

	if (!library)
		library = dlopen("libnccl.so.2", RTLD_NOW);
	function = library ? dlsym(library, name) : NULL;
	if (!function) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return function;
}

static void reduce(void)
{
	long long start = now_ns();

	must(all_reduce(NULL, NULL, GRADIENTS, 7, 0, comm, stream), "ncclAllReduce");
	log_span("come", start, now_ns());
}

static void launches(int count, unsigned size)
{
	int i;

	for (i = 0; i < count; i++)
		launch(kernel, BLOCKS * size, KERNEL_NS * size, stream);
}

static void copy_large(const void *from, int times)
{
	while (times--)
		must(cuMemcpyHtoDAsync_v2(device_memory, from, LARGE_BYTES, stream), "cuMemcpyHtoDAsync");
}

static void step(const char *fault)
{
	work_for(100000);
	must(cuMemcpyHtoDAsync_v2(device_memory, input, INPUT_BYTES, stream), "cuMemcpyHtoDAsync");
	if (!strcmp(fault, "copy"))
		copy_large(large, 1);
	else if (!strcmp(fault, "pinned"))
		copy_large(pinned, 3);
	else if (!strcmp(fault, "sleep"))
		rest_for(8 * MS);
	else if (!strcmp(fault, "shift"))
		rest_for(3 * MS);
	launches(!strcmp(fault, "work") ? 8 * LAUNCHES : LAUNCHES, strcmp(fault, "larger") ? 1 : 5);
	reduce();
	launches(LAUNCHES / 2, 1);
	reduce();
	must(cuMemcpyDtoHAsync_v2(output, device_memory, OUTPUT_BYTES, stream), "cuMemcpyDtoHAsync");
	must(cuStreamSynchronize(stream), "cuStreamSynchronize");
}

static void prepare(void)
{
	struct unique_id id = {{0}};

	start_gpu();
	must(cuStreamCreate(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
	kernel = kernel_named("_Z13backward_gemmPKfS0_Pf");
	must(cuMemAlloc_v2(&device_memory, LARGE_BYTES), "cuMemAlloc");
	input = calloc(1, INPUT_BYTES);
	output = calloc(1, OUTPUT_BYTES);
	large = malloc(LARGE_BYTES);
	must(cuMemHostAlloc((void **)&pinned, LARGE_BYTES, 0), "cuMemHostAlloc");
	*(void **)&init_rank = nccl("ncclCommInitRank");
	*(void **)&all_reduce = nccl("ncclAllReduce");
	strncpy(id.bytes, options.id, sizeof(id.bytes) - 1);
	must(init_rank(&comm, options.ranks, id, options.rank), "ncclCommInitRank");
}

int main(int argc, char **argv)
{
	unsigned random;
	int idles, shifts, steps, number;

	parse_options(argc, argv, &options);
	random = options.seed;
	idles = !strcmp(options.kind, "slack");
	shifts = !strcmp(options.fault, "shift");
	steps = options.seconds * (idles ? 50 : STEPS_PER_S); /* counted, so that all ranks make as many */
	puts("ready"); /* the others are not there yet, and joining waits for them */
	fflush(stdout);
	prepare();
	for (number = 0; number < steps; number++) {
		long long start, fault_start = now_ns();
		int late = strcmp(options.fault, "none") && number >= CLEAN_STEPS;

		late = late && (shifts ? number > steps / 2 : random_share(&random) < FAULT_SHARE);
		if (late && idles) {
			copy_large(large, 1);
			must(cuStreamSynchronize(stream), "cuStreamSynchronize");
			late = 0;
		}
		if (idles)
			rest_for(fault_start + LONG_REST - now_ns());
		start = now_ns();
		step(late ? options.fault : "none");
		log_span("request", start, now_ns());
		if (late)
			log_span("fault", fault_start, now_ns());
		rest_for(REST);
	}
	write_log(&options);
	return 0;
}
