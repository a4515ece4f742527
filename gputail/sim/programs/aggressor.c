/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Another tenant of the node: after two quiet seconds a burst every 0.3 to 0.7 s, each logged.
 *
 * --kind  xgemm   40 large kernels on the GPU
 *         xcopy   pinned copies to and from the GPU, one after another, for about 60 ms
 *         cpuhog  three busy loops for 120 ms, on whatever CPUs this process may use
 */
#include "common.h"

#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define QUIET (2000 * MS)
#define COPY_BYTES (64 << 20)

static handle stream, kernel;
static uint64_t device_memory;
static void *pinned;

/* Kernels for so many ms. */
static void multiply(int ms)
{
	int i;

	for (i = 0; i < ms; i++)
		launch(kernel, FULL_GRID, MS, stream);
	must(cuStreamSynchronize(stream), "cuStreamSynchronize");
}

static void copy(void)
{
	int i;

	for (i = 0; i < 20; i++)
		must(cuMemcpyHtoDAsync_v2(device_memory, pinned, COPY_BYTES, stream), "cuMemcpyHtoDAsync");
	must(cuStreamSynchronize(stream), "cuStreamSynchronize");
}

static void hog(void)
{
	pid_t child[3];
	int i;

	for (i = 0; i < 3; i++) {
		child[i] = fork();
		if (!child[i]) {
			long long end = now_ns() + 120 * MS;

			while (now_ns() < end)
				;
			_exit(0);
		}
	}
	for (i = 0; i < 3; i++)
		waitpid(child[i], NULL, 0);
}

int main(int argc, char **argv)
{
	static const int lengths[] = {1, 2, 8}; /* ms of kernels in a burst; half a request's wait, or all of it */
	struct options options;
	unsigned random;
	long long begin, end;
	int on_gpu;

	parse_options(argc, argv, &options);
	random = options.seed;
	on_gpu = strcmp(options.kind, "cpuhog");
	if (on_gpu) {
		start_gpu();
		must(cuStreamCreate(&stream, STREAM_NON_BLOCKING), "cuStreamCreate");
		kernel = kernel_named("_Z19other_tenant_matmulPKfS0_Pf");
		must(cuMemAlloc_v2(&device_memory, COPY_BYTES), "cuMemAlloc");
		must(cuMemHostAlloc(&pinned, COPY_BYTES, 0), "cuMemHostAlloc");
	}
	begin = now_ns();
	end = begin + (long long)(options.seconds * 1000 * MS);
	puts("ready");
	fflush(stdout);
	rest_for(QUIET);
	for (;;) {
		long long start;

		rest_for((options.varied ? 40 + 60 * random_share(&random) : 300 + 400 * random_share(&random)) * MS);
		if (now_ns() + 200 * MS > end)
			break;
		start = now_ns();
		if (!strcmp(options.kind, "xgemm"))
			multiply(options.varied ? lengths[(int)(3 * random_share(&random))] : 40);
		else if (!strcmp(options.kind, "xcopy"))
			copy();
		else
			hog();
		log_span("burst", start, now_ns());
	}
	write_log(&options);
	return 0;
}
