/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A latency-sensitive program: it answers requests one after another on one thread, each an input made, copied to the
 * GPU, worked on by some launches, and a result copied back; then 2 ms of rest. With --fault, 3 in 100 of its requests
 * do to themselves what the fault is called for, after two clean seconds. All is logged.
 *
 * --kind  cpu    about 10 ms, mostly launching: the GPU keeps up
 *         gpu    about 5 ms, mostly waiting for the GPU in the last copy
 *         graph  one graph launch in place of the launches
 *         async  pinned copies, and an event that ends the request
 */
#include "common.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define CLEAN_S 2
#define FAULT_SHARE 0.03
#define REST (2 * MS)
#define PAGEABLE_BYTES (192 << 20)

static struct {
	int launches;
	long long host_ns;   /* on the CPU before each launch */
	uint64_t kernel_ns;
	unsigned blocks;
	size_t input_bytes, output_bytes;
} shape;

static struct options options;
static handle stream, side_stream, kernel, side_kernel, graph, done;
static uint64_t device_memory;
static char *input, *output, *big;
static pthread_mutex_t interpreter = PTHREAD_MUTEX_INITIALIZER; /* whoever computes in "Python" holds it */
static pthread_mutex_t side_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t side_wanted = PTHREAD_COND_INITIALIZER, side_done = PTHREAD_COND_INITIALIZER;
static const char *side_job; /* what the other thread is to do, NULL for nothing */

/* The other thread of the process: fills its own stream, or computes and holds the interpreter lock. */
static void *side_thread(void *unused)
{
	const char *job;
	int i;

	use_gpu();
	for (;;) {
		pthread_mutex_lock(&side_lock);
		while (!side_job)
			pthread_cond_wait(&side_wanted, &side_lock);
		job = side_job;
		pthread_mutex_unlock(&side_lock);
		if (!strcmp(job, "quit"))
			return unused;
		if (!strcmp(job, "compute"))
			pthread_mutex_lock(&interpreter);
		else
			for (i = 0; i < 8; i++)
				launch(side_kernel, FULL_GRID, 2 * MS, side_stream);
		pthread_mutex_lock(&side_lock);
		side_job = NULL;
		pthread_cond_signal(&side_done);
		pthread_mutex_unlock(&side_lock);
		if (!strcmp(job, "compute")) {
			work_for(15 * MS);
			pthread_mutex_unlock(&interpreter);
		} else {
			cuStreamSynchronize(side_stream);
		}
	}
}

/* Have the other thread start on something, and wait until it has. */
static void start_side(const char *job)
{
	pthread_mutex_lock(&side_lock);
	side_job = job;
	pthread_cond_signal(&side_wanted);
	while (side_job)
		pthread_cond_wait(&side_done, &side_lock);
	pthread_mutex_unlock(&side_lock);
}

static void compute(long long ns)
{
	pthread_mutex_lock(&interpreter);
	work_for(ns);
	pthread_mutex_unlock(&interpreter);
}

/* What goes wrong within a request, before its input is copied or behind it. */
static void fault_within(const char *fault)
{
	static char ptx[200000] = "//\n.version 8.0\n";
	handle module;
	uint64_t address;
	int i;

	if (!strcmp(fault, "gil")) {
		start_side("compute");
	} else if (!strcmp(fault, "pageable")) {
		must(cuMemcpyHtoDAsync_v2(device_memory, big, PAGEABLE_BYTES, stream), "cuMemcpyHtoDAsync");
	} else if (!strcmp(fault, "ptxjit")) {
		must(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
		must(cuModuleUnload(module), "cuModuleUnload");
	} else if (!strcmp(fault, "alloc")) {
		for (i = 0; i < 8; i++) {
			must(cuMemAlloc_v2(&address, 64 << 20), "cuMemAlloc");
			must(cuMemFree_v2(address), "cuMemFree");
		}
	} else if (!strcmp(fault, "devsync") || !strcmp(fault, "gdevsync")) {
		must(cuCtxSynchronize(), "cuCtxSynchronize");
	}
}

static void launches(int more)
{
	int i;

	if (!strcmp(options.kind, "graph")) {
		must(cuGraphLaunch(graph, stream), "cuGraphLaunch");
		return;
	}
	for (i = 0; i < shape.launches; i++) {
		compute(shape.host_ns);
		launch(kernel, shape.blocks * more, shape.kernel_ns * more, stream);
	}
}

static void answer(int more, const char *fault)
{
	compute(100000); /* making the input */
	if (fault && !strcmp(fault, "pageable"))
		fault_within(fault);
	must(cuMemcpyHtoDAsync_v2(device_memory, input, shape.input_bytes, stream), "cuMemcpyHtoDAsync");
	if (!strcmp(options.kind, "cpu"))
		must(cuStreamSynchronize(stream), "cuStreamSynchronize");
	if (fault && strcmp(fault, "pageable"))
		fault_within(fault);
	launches(more);
	must(cuMemcpyDtoHAsync_v2(output, device_memory, shape.output_bytes, stream), "cuMemcpyDtoHAsync");
	if (!strcmp(options.kind, "async")) {
		must(cuEventRecord(done, stream), "cuEventRecord");
		must(cuEventSynchronize(done), "cuEventSynchronize");
	} else {
		must(cuStreamSynchronize(stream), "cuStreamSynchronize");
	}
}

static void request(int is_faulty)
{
	const char *fault = is_faulty ? options.fault : NULL;
	int more = fault && !strcmp(fault, "morework") ? 48 : 1;
	long long start, fault_start = now_ns();

	if (fault && (!strcmp(fault, "gside") || !strcmp(fault, "devsync") || !strcmp(fault, "gdevsync")))
		start_side("launch");
	start = now_ns();
	answer(more, fault);
	log_span("request", start, now_ns());
	if (fault)
		log_span("fault", fault_start, now_ns());
}

static void prepare(void)
{
	handle captured;
	int is_cpu = !strcmp(options.kind, "cpu");

	shape.launches = is_cpu ? 150 : 120;
	shape.host_ns = is_cpu ? 55000 : 6000;
	shape.kernel_ns = is_cpu ? 8000 : 34000;
	shape.blocks = is_cpu ? 16 : FULL_GRID;
	shape.input_bytes = is_cpu ? 256 << 10 : 8 << 20;
	shape.output_bytes = 8 << 10;
	must(cuStreamCreate(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
	must(cuStreamCreate(&side_stream, STREAM_NON_BLOCKING), "cuStreamCreate");
	must(cuEventCreate(&done, 0), "cuEventCreate");
	kernel = kernel_named("_Z15victim_gemm_f16PKfS0_Pf");
	side_kernel = kernel_named("_Z15side_stream_gemPKfS0_Pf");
	must(cuMemAlloc_v2(&device_memory, PAGEABLE_BYTES), "cuMemAlloc");
	if (!strcmp(options.kind, "async")) {
		must(cuMemHostAlloc((void **)&input, shape.input_bytes, 0), "cuMemHostAlloc");
		must(cuMemHostAlloc((void **)&output, shape.output_bytes, 0), "cuMemHostAlloc");
	} else {
		input = calloc(1, shape.input_bytes);
		output = calloc(1, shape.output_bytes);
	}
	big = malloc(PAGEABLE_BYTES);
	if (!strcmp(options.kind, "graph")) {
		int i;

		must(cuStreamBeginCapture_v2(stream, 0), "cuStreamBeginCapture");
		for (i = 0; i < shape.launches; i++)
			launch(kernel, shape.blocks, shape.kernel_ns, stream);
		must(cuStreamEndCapture(stream, &captured), "cuStreamEndCapture");
		must(cuGraphInstantiateWithFlags(&graph, captured, 0), "cuGraphInstantiate");
	}
}

int main(int argc, char **argv)
{
	pthread_t side;
	unsigned random;
	long long begin, end;

	parse_options(argc, argv, &options);
	random = options.seed;
	start_gpu();
	prepare();
	pthread_create(&side, NULL, side_thread, NULL);
	begin = now_ns();
	end = begin + (long long)(options.seconds * 1000 * MS);
	puts("ready");
	fflush(stdout);
	while (now_ns() < end) {
		int is_faulty = strcmp(options.fault, "none") && now_ns() > begin + CLEAN_S * 1000 * MS;

		request(is_faulty && random_share(&random) < FAULT_SHARE);
		rest_for(REST);
	}
	pthread_mutex_lock(&side_lock);
	side_job = "quit";
	pthread_cond_signal(&side_wanted);
	pthread_mutex_unlock(&side_lock);
	pthread_join(side, NULL);
	write_log(&options);
	return 0;
}
