/* SPDX-License-Identifier: GPL-2.0 */
#include "common.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static handle context;

void parse_options(int argc, char **argv, struct options *options)
{
	int i;

	*options = (struct options){.kind = "cpu", .fault = "none", .truth = NULL, .id = "ranks", .seconds = 5, .seed = 1, .ranks = 1};
	for (i = 1; i + 1 < argc; i += 2) {
		if (!strcmp(argv[i], "--kind"))
			options->kind = argv[i + 1];
		else if (!strcmp(argv[i], "--fault"))
			options->fault = argv[i + 1];
		else if (!strcmp(argv[i], "--truth"))
			options->truth = argv[i + 1];
		else if (!strcmp(argv[i], "--seconds"))
			options->seconds = atof(argv[i + 1]);
		else if (!strcmp(argv[i], "--seed"))
			options->seed = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--varied"))
			options->varied = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--id"))
			options->id = argv[i + 1];
		else if (!strcmp(argv[i], "--rank"))
			options->rank = atoi(argv[i + 1]);
		else if (!strcmp(argv[i], "--ranks"))
			options->ranks = atoi(argv[i + 1]);
		else
			break;
	}
	if (i != argc || !options->truth) {
		fprintf(stderr, "usage: %s --truth FILE [--kind K] [--fault F] [--seconds S] [--seed N] [--varied 0|1] [--rank R --ranks N --id I]\n", argv[0]);
		exit(2);
	}
}

long long now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000 * MS + time.tv_nsec;
}

/* By the CPU's own time, so that a thread kept off the CPU has its work still before it. */
void work_for(long long ns)
{
	struct timespec time;
	long long end;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	end = time.tv_sec * 1000 * MS + time.tv_nsec + ns;
	do
		clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
	while (time.tv_sec * 1000 * MS + time.tv_nsec < end);
}

void rest_for(long long ns)
{
	struct timespec time = {ns / (1000 * MS), ns % (1000 * MS)};

	nanosleep(&time, NULL);
}

double random_share(unsigned *state)
{
	return rand_r(state) / ((double)RAND_MAX + 1);
}

void must(int result, const char *what)
{
	if (result) {
		fprintf(stderr, "%s failed: %d\n", what, result);
		exit(1);
	}
}

void start_gpu(void)
{
	must(cuInit(0), "cuInit");
	must(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
	use_gpu();
}

void use_gpu(void)
{
	must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

handle kernel_named(const char *name)
{
	static char image[4096] = "binary";
	handle module, function;

	must(cuModuleLoadData(&module, image), "cuModuleLoadData");
	must(cuModuleGetFunction(&function, module, name), "cuModuleGetFunction");
	return function;
}

void launch(handle kernel, unsigned blocks, uint64_t ns, handle stream)
{
	void *params[] = {&ns};

	must(cuLaunchKernel(kernel, blocks, 1, 1, 256, 1, 1, 0, stream, params, NULL), "cuLaunchKernel");
}

#define MAX_SPANS 200000

static struct {
	const char *what;
	long long start, end;
} spans[MAX_SPANS];
static unsigned n_spans;
static pthread_mutex_t spans_lock = PTHREAD_MUTEX_INITIALIZER;

void log_span(const char *what, long long start, long long end)
{
	pthread_mutex_lock(&spans_lock);
	if (n_spans < MAX_SPANS) {
		spans[n_spans].what = what;
		spans[n_spans].start = start;
		spans[n_spans++].end = end;
	}
	pthread_mutex_unlock(&spans_lock);
}

void write_log(const struct options *options)
{
	FILE *file = fopen(options->truth, "w");
	unsigned i;

	if (!file) {
		perror(options->truth);
		exit(1);
	}
	fprintf(file, "pid %d\n", getpid());
	for (i = 0; i < n_spans; i++)
		fprintf(file, "%s %lld %lld\n", spans[i].what, spans[i].start, spans[i].end);
	if (fclose(file)) {
		perror(options->truth);
		exit(1);
	}
}
