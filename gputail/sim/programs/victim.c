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
 *         copy   hardly anything but a large pinned copy to the GPU
 *         burst  more launches than a queue holds, of kernels so small that they never queue up
 *
 * Faults, each in the request unless said otherwise:
 *         gside      another stream of the process has kernels queued
 *         gdevsync, devsync   the same, and a wait for the whole device
 *         between    the same, but done before the next request: a twin of gside that hurts nothing
 *         longkernel one long kernel of its own before the usual wait
 *         pageable   a large copy out of pageable memory
 *         morework   48 times the batch; --varied: more launches
 *         gil        another thread computes and holds the interpreter lock
 *         compute    the thread itself computes
 *         sleep      the thread sleeps
 *         ptxjit, module, alloc    compiles, loads a module, allocates and frees
 *         backpressure   its stream waits for another one (kind burst: until the queue is full)
 *         noise      a little of everything on the host, which is no reason
 *         shift8, shift12, shift30   no fault: from half of the time on every request has so many hundredths more work
 *         ramp       the same, from nothing to 30 hundredths over 3 seconds
 *
 * SIGTERM ends it early; the log is whole.
 *
 * --varied: each fault takes one of 6, 17 and 45 hundredths of a usual request, and 1 in 8 requests has one.
 */
#include "common.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define CLEAN_S 2
#define FAULT_SHARE 0.03
#define VARIED_SHARE 0.125
#define BURST 1200 /* launches: more than the 1024 operations that a stream of the simulated driver holds */
#define REST (2 * MS)
#define PAGEABLE_BYTES (192 << 20)
#define PAGEABLE_BYTES_PER_NS 8.0 /* of the simulated driver; a module takes it 2 ms, an allocation and its free 200 us */
#define WARM_UP 100

static struct {
	int launches;
	long long host_ns;   /* on the CPU before each launch */
	uint64_t kernel_ns;
	unsigned blocks;
	size_t input_bytes, output_bytes;
} shape;

static struct options options;
static handle stream, side_stream, kernel, side_kernel, graph, done, side_event;
static uint64_t device_memory;
static char *input, *output, *big;
static pthread_mutex_t interpreter = PTHREAD_MUTEX_INITIALIZER; /* whoever computes in "Python" holds it */
static pthread_mutex_t side_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t side_wanted = PTHREAD_COND_INITIALIZER, side_done = PTHREAD_COND_INITIALIZER;
static const char *side_job; /* what the other thread is to do, NULL for nothing */
static long long usual_ns;   /* what a request takes: the mean of the first ones */
static int usual_requests;
static double shift;	     /* of the usual, what every request has more of by now */
static double scale;	     /* of the usual, what the next fault is to take; 0 for what cannot be overlooked */

static long long magnitude(long long otherwise_ns)
{
	return scale ? (long long)(scale * usual_ns) : otherwise_ns;
}

static void launch_beside(void)
{
	int i;

	for (i = 0; i < 8; i++)
		launch(side_kernel, FULL_GRID, magnitude(16 * MS) / 8, side_stream);
}

/* The other thread of the process: fills its own stream, or computes and holds the interpreter lock. */
static void *side_thread(void *unused)
{
	const char *job;

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
			launch_beside();
		pthread_mutex_lock(&side_lock);
		side_job = NULL;
		pthread_cond_signal(&side_done);
		pthread_mutex_unlock(&side_lock);
		if (!strcmp(job, "compute")) {
			work_for(magnitude(15 * MS));
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
	static char ptx[200000] = "//\n.version 8.0\n", binary[64] = "binary";
	handle module;
	uint64_t address;
	int i;

	if (!strcmp(fault, "gil")) {
		start_side("compute");
	} else if (!strcmp(fault, "pageable")) {
		size_t bytes = magnitude(PAGEABLE_BYTES / PAGEABLE_BYTES_PER_NS) * PAGEABLE_BYTES_PER_NS;

		must(cuMemcpyHtoDAsync_v2(device_memory, big, bytes, stream), "cuMemcpyHtoDAsync");
	} else if (!strcmp(fault, "ptxjit")) {
		must(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
		must(cuModuleUnload(module), "cuModuleUnload");
	} else if (!strcmp(fault, "module")) {
		for (i = 0; i <= magnitude(8 * MS) / (2 * MS); i++)
			must(cuModuleLoadData(&module, binary), "cuModuleLoadData");
	} else if (!strcmp(fault, "alloc")) {
		for (i = 0; i <= magnitude(0) / 200000 || (!scale && i < 8); i++) {
			must(cuMemAlloc_v2(&address, scale ? 4096 : 64 << 20), "cuMemAlloc");
			must(cuMemFree_v2(address), "cuMemFree");
		}
	} else if (!strcmp(fault, "devsync") || !strcmp(fault, "gdevsync")) {
		must(cuCtxSynchronize(), "cuCtxSynchronize");
	} else if (!strcmp(fault, "longkernel")) {
		launch(kernel, shape.blocks, magnitude(10 * MS), stream);
	} else if (!strcmp(fault, "compute")) {
		compute(magnitude(5 * MS));
	} else if (!strcmp(fault, "sleep")) {
		rest_for(magnitude(5 * MS));
	} else if (!strcmp(fault, "noise")) {
		compute(100000);
		rest_for(50000);
		must(cuMemAlloc_v2(&address, 4096), "cuMemAlloc");
		must(cuMemFree_v2(address), "cuMemFree");
	}
}

/* Make the stream of the request wait for what another one does. */
static void hold_up(void)
{
	scale = 0; /* a queue of this length fills only behind something long */
	launch_beside();
	must(cuEventRecord(side_event, side_stream), "cuEventRecord");
	must(cuStreamWaitEvent(stream, side_event, 0), "cuStreamWaitEvent");
}

static void launches(int more)
{
	int i;

	if (!strcmp(options.kind, "graph")) {
		must(cuGraphLaunch(graph, stream), "cuGraphLaunch");
		return;
	}
	for (i = 0; i < (more > 1 && scale ? (1 + scale) * shape.launches : shape.launches); i++) {
		compute(shape.host_ns);
		launch(kernel, shape.blocks * (scale ? 1 : more), shape.kernel_ns * (scale ? 1 : more), stream);
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
	if (fault && !strcmp(fault, "backpressure"))
		hold_up();
	launches(more);
	if (shift > 0)
		launch(kernel, shape.blocks, shift * usual_ns, stream);
	must(cuMemcpyDtoHAsync_v2(output, device_memory, shape.output_bytes, stream), "cuMemcpyDtoHAsync");
	if (!strcmp(options.kind, "async")) {
		must(cuEventRecord(done, stream), "cuEventRecord");
		must(cuEventSynchronize(done), "cuEventSynchronize");
	} else {
		must(cuStreamSynchronize(stream), "cuStreamSynchronize");
	}
}

/* Whether the fault begins with another thread's kernels. */
static int is_beside(const char *fault)
{
	return !strcmp(fault, "gside") || !strcmp(fault, "devsync") || !strcmp(fault, "gdevsync") || !strcmp(fault, "between");
}

/* The faults of a program that is slow for many reasons, as they are logged. */
static const char *const mixed[] = {"fault:compute", "fault:morework", "fault:devsync", "fault:sleep", "fault:alloc", "fault:module"};

enum { MIXED = sizeof(mixed) / sizeof(*mixed) };

static void request(const char *logged, double size)
{
	const char *fault = !logged ? NULL : strchr(logged, ':') ? strchr(logged, ':') + 1 : options.fault;
	int more = fault && !strcmp(fault, "morework") ? 48 : 1;
	long long start, fault_start = now_ns();

	scale = size;
	if (fault && is_beside(fault))
		start_side("launch");
	if (fault && !strcmp(fault, "between"))
		rest_for(magnitude(16 * MS) + 3 * MS);
	start = now_ns();
	answer(more, fault);
	log_span("request", start, now_ns());
	if (fault)
		log_span(logged, fault_start, now_ns());
	if (usual_requests < WARM_UP)
		usual_ns = (usual_ns * usual_requests + now_ns() - start) / (usual_requests + 1), usual_requests++;
}

static void prepare(void)
{
	handle captured;
	int is_cpu = !strcmp(options.kind, "cpu"), is_copy = !strcmp(options.kind, "copy"), is_burst = !strcmp(options.kind, "burst");

	shape.launches = is_cpu ? 150 : is_copy ? 10 : is_burst ? BURST : 120;
	shape.host_ns = is_cpu ? 55000 : is_burst ? 2000 : 6000;
	shape.kernel_ns = is_cpu ? 8000 : is_burst ? 1000 : 34000;
	shape.blocks = is_cpu || is_burst ? 16 : FULL_GRID;
	shape.input_bytes = is_cpu ? 256 << 10 : is_copy ? 100 << 20 : 8 << 20;
	shape.output_bytes = 8 << 10;
	must(cuStreamCreate(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
	must(cuStreamCreate(&side_stream, STREAM_NON_BLOCKING), "cuStreamCreate");
	must(cuEventCreate(&done, 0), "cuEventCreate");
	must(cuEventCreate(&side_event, 0), "cuEventCreate");
	kernel = kernel_named("_Z15victim_gemm_f16PKfS0_Pf");
	side_kernel = kernel_named("_Z15side_stream_gemPKfS0_Pf");
	must(cuMemAlloc_v2(&device_memory, PAGEABLE_BYTES), "cuMemAlloc");
	if (!strcmp(options.kind, "async") || is_copy) {
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

/* How much more work (of the usual) a program that changes for good has at a time since its beginning. */
static double shift_at(long long since_ns)
{
	double late_s = since_ns / 1e9 - options.seconds / 2;

	if (late_s < 0)
		return 0;
	if (!strncmp(options.fault, "shift", 5))
		return atoi(options.fault + 5) / 100.0;
	return strcmp(options.fault, "ramp") ? 0 : 0.3 * (late_s < 3 ? late_s / 3 : 1);
}

static volatile sig_atomic_t is_over;

static void end_early(int number)
{
	is_over = number;
}

int main(int argc, char **argv)
{
	static const double sizes[] = {0.06, 0.17, 0.45};
	pthread_t side;
	const char *logged;
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
	signal(SIGTERM, end_early);
	while (now_ns() < end && !is_over) {
		int is_shifting = !strncmp(options.fault, "shift", 5) || !strcmp(options.fault, "ramp");
		int is_faulty = strcmp(options.fault, "none") && !is_shifting && now_ns() > begin + CLEAN_S * 1000 * MS;

		shift = shift_at(now_ns() - begin);

		is_faulty = is_faulty && random_share(&random) < (options.varied ? VARIED_SHARE : FAULT_SHARE);
		logged = !is_faulty ? NULL : strcmp(options.fault, "mixed") ? "fault" : mixed[(int)(random_share(&random) * MIXED)];
		request(logged, options.varied ? sizes[(int)(3 * random_share(&random))] : 0);
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
