/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Inside libcuda: its types, and what its files use of each other. Types and numbers are those of cuda.h (CUDA 13).
 */
#ifndef GPUTAIL_SIM_DRIVER_H
#define GPUTAIL_SIM_DRIVER_H

#include "gpu.h"

#define API __attribute__((visibility("default"), noinline))
#define UNUSED __attribute__((unused))

enum {
	SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	FILE_NOT_FOUND = 301,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	NOT_READY = 600,
	NOT_SUPPORTED = 801,
	STREAM_CAPTURE_UNSUPPORTED = 900,
	STREAM_CAPTURE_INVALIDATED = 901,
};

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned int CUdeviceptr_v1;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUgraph_st *CUgraph;
typedef struct CUgraphExec_st *CUgraphExec;
typedef struct CUarray_st *CUarray;

struct CUstream_st {
	uint32_t queue;	     /* its slot in the shared memory */
	unsigned int flags;
	int priority;
	CUgraph capture;     /* being recorded instead of run */
	CUstream joined;     /* the next of the streams that are recorded with another, whose event they waited for */
};

struct CUevent_st {
	uint32_t slot;
	unsigned int flags;
	CUgraph capture;     /* its latest record was of a stream that is being recorded */
};

struct CUfunc_st {
	void *module;
	const char *name;    /* at offset 8, as in the real driver */
	CUfunction next;
};

typedef struct {
	unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
	CUstream stream;
	void *attributes;
	unsigned int attribute_count;
} CUlaunchConfig;

typedef struct {
	CUfunction function;
	unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
	CUstream stream;
	void **params;
} CUDA_LAUNCH_PARAMS;

/* A place in a queue to wait for: the end of the operation, or that at most `left` of it is left once it runs. */
struct mark {
	uint32_t queue;
	uint64_t position;
	double left;
};

/* queue.c */
CUresult queue_op(CUstream stream, const struct op *op, struct mark *mark);
CUresult queue_group(CUstream stream, const struct op *ops, unsigned int count, struct mark *mark);
void wait_for(const struct mark *marks, unsigned int count);
void wait_for_device(void);
bool is_done(const struct mark *mark); /* with the lock held */
void wait_a_moment(int64_t until_ns);
void burn_until(int64_t until_ns);
void sleep_until(int64_t until_ns);

/* streams.c: stream 0 of the _ptsz and _ptds symbols is the calling thread's own default stream */
extern struct CUstream_st legacy_stream;
CUresult find_stream(CUstream *stream, bool per_thread);
CUresult open_stream(CUstream stream, unsigned int flags);
void close_stream(CUstream stream);

/* hook.c */
void run_hook(void);

/* context.c */
CUresult check_context(void);

/* graphs.c */
CUresult record_op(CUgraph graph, const struct op *ops, unsigned int count);
void record_too(CUgraph graph, CUstream stream);

/* launch.c */
CUresult make_kernel(struct op *op, CUfunction function, void **params, double threads);
CUresult queue_launch(CUstream stream, const struct op *ops, unsigned int count);

/* memory.c */
bool is_device(CUdeviceptr address);
bool is_pinned(const void *address);

#endif
