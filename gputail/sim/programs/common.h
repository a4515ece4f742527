/* SPDX-License-Identifier: GPL-2.0 */
/* What the simulated programs share: the driver functions they call, clocks and loops, and the log of what they did. */
#ifndef GPUTAIL_PROGRAMS_COMMON_H
#define GPUTAIL_PROGRAMS_COMMON_H

#include <stdint.h>
#include <stdio.h>

typedef void *handle;

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(handle *context, int device);
int cuCtxSetCurrent(handle context);
int cuCtxSynchronize(void);
int cuStreamCreate(handle *stream, unsigned flags);
int cuStreamSynchronize(handle stream);
int cuEventCreate(handle *event, unsigned flags);
int cuEventRecord(handle event, handle stream);
int cuStreamWaitEvent(handle stream, handle event, unsigned flags);
int cuEventSynchronize(handle event);
int cuModuleLoadData(handle *module, const void *image);
int cuModuleUnload(handle module);
int cuModuleGetFunction(handle *function, handle module, const char *name);
int cuMemAlloc_v2(uint64_t *address, size_t bytes);
int cuMemFree_v2(uint64_t address);
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags);
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, handle stream);
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, handle stream);
int cuLaunchKernel(handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
		   handle stream, void **params, void **extra);
int cuStreamBeginCapture_v2(handle stream, int mode);
int cuStreamEndCapture(handle stream, handle *graph);
int cuGraphInstantiateWithFlags(handle *exec, handle graph, unsigned long long flags);
int cuGraphLaunch(handle exec, handle stream);

#define STREAM_NON_BLOCKING 1
#define MS 1000000LL

/* Options that every program takes. */
struct options {
	const char *kind, *fault, *truth, *id;
	double seconds;
	int rank, ranks; /* of a communicator, for programs that are one of several */
	unsigned seed;
	int varied; /* faults and bursts of several sizes, and more of them, instead of one that cannot be overlooked */
};

void parse_options(int argc, char **argv, struct options *options);

long long now_ns(void);		      /* CLOCK_MONOTONIC */
void work_for(long long ns);	      /* on the CPU */
void rest_for(long long ns);	      /* off it */
double random_share(unsigned *state); /* 0 to 1 */
void must(int result, const char *what);

/* A kernel by its name, and one launch of it that takes `ns` on an idle GPU; blocks of 256 threads. */
handle kernel_named(const char *name);
void launch(handle kernel, unsigned blocks, uint64_t ns, handle stream);
#define FULL_GRID 1056 /* blocks of 256 threads that fill the simulated GPU */

void start_gpu(void); /* cuInit and the primary context, for the calling thread */
void use_gpu(void);   /* the same context for another thread */

/* The log: one line an entry, written out whole at the end so that logging costs the program nothing. */
void log_span(const char *what, long long start, long long end);
void write_log(const struct options *options);

#endif
