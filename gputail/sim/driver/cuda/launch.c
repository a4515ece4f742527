/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Launches. A kernel's first argument is the nanoseconds that it takes alone on the idle GPU; its share of the GPU is that
 * of the threads that fit: 132 multiprocessors of 2048.
 */
#include "driver.h"

#define THREADS (132.0 * 2048.0)
#define LAUNCH_NS (2 * US)
#define DEFAULT_KERNEL_NS 5000

/* What the next cuLaunchKernelEx of this thread queues instead of a kernel: set by libnccl, which launches so. */
static __thread struct op instead[QUEUE];
static __thread unsigned int instead_count;

struct grid {
	unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z;
};

/* A launch takes the caller's own time, too. */
CUresult queue_launch(CUstream stream, const struct op *ops, unsigned int count)
{
	int64_t until_ns = now_ns() + LAUNCH_NS;
	CUresult result = queue_group(stream, ops, count, NULL);

	burn_until(until_ns);
	return result;
}

CUresult make_kernel(struct op *op, CUfunction function, void **params, double threads)
{
	if (!function || threads < 1)
		return function ? INVALID_VALUE : INVALID_HANDLE;
	*op = (struct op){.kind = KERNEL, .share = threads < THREADS ? threads / THREADS : 1};
	op->work = params && params[0] ? (double)*(const uint64_t *)params[0] : DEFAULT_KERNEL_NS;
	return SUCCESS;
}

static CUresult launch(CUfunction function, struct grid grid, CUstream stream, void **params, bool per_thread)
{
	double threads = (double)grid.grid_x * grid.grid_y * grid.grid_z * grid.block_x * grid.block_y * grid.block_z;
	unsigned int count = instead_count ? instead_count : 1;
	struct op op;
	const struct op *ops = instead_count ? instead : &op;
	CUresult result = find_stream(&stream, per_thread);

	instead_count = 0;
	if (!result)
		result = make_kernel(&op, function, params, threads);
	if (result)
		return result;
	return stream->capture ? record_op(stream->capture, ops, count) : queue_launch(stream, ops, count);
}

/* For libnccl: the operations that this thread's next launch stands for. */
API int gputail_sim_instead(const struct op *ops, unsigned int count)
{
	unsigned int i;

	if (count > QUEUE)
		return INVALID_VALUE;
	for (i = 0; i < count; i++)
		instead[i] = ops[i];
	instead_count = count;
	return SUCCESS;
}

#define LAUNCH(name, per_thread)                                                                                              \
	API CUresult name(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,            \
			  unsigned int by, unsigned int bz, unsigned int shared UNUSED, CUstream stream, void **params,       \
			  void **extra UNUSED)                                                                                \
	{                                                                                                                     \
		return launch(function, (struct grid){gx, gy, gz, bx, by, bz}, stream, params, per_thread);                   \
	}

LAUNCH(cuLaunchKernel, false)
LAUNCH(cuLaunchKernel_ptsz, true)

#define LAUNCH_COOPERATIVE(name, per_thread)                                                                                  \
	API CUresult name(CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,            \
			  unsigned int by, unsigned int bz, unsigned int shared UNUSED, CUstream stream, void **params)       \
	{                                                                                                                     \
		return launch(function, (struct grid){gx, gy, gz, bx, by, bz}, stream, params, per_thread);                   \
	}

LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel, false)
LAUNCH_COOPERATIVE(cuLaunchCooperativeKernel_ptsz, true)

static CUresult launch_ex(const CUlaunchConfig *config, CUfunction function, void **params, bool per_thread)
{
	struct grid grid = {config->grid_x, config->grid_y, config->grid_z, config->block_x, config->block_y, config->block_z};

	return launch(function, grid, config->stream, params, per_thread);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra UNUSED)
{
	return launch_ex(config, function, params, false);
}

API CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra UNUSED)
{
	return launch_ex(config, function, params, true);
}

API CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags UNUSED)
{
	CUresult result = SUCCESS;
	unsigned int i;

	for (i = 0; i < count && !result; i++) {
		struct grid grid = {list[i].grid_x, list[i].grid_y, list[i].grid_z, list[i].block_x, list[i].block_y, list[i].block_z};

		result = launch(list[i].function, grid, list[i].stream, list[i].params, false);
	}
	return result;
}

/* The calls of CUDA 3: blocks of a shape set beforehand, which is not kept here. */
API CUresult cuLaunch(CUfunction function)
{
	return launch(function, (struct grid){1, 1, 1, 256, 1, 1}, NULL, NULL, false);
}

API CUresult cuLaunchGrid(CUfunction function, int width, int height)
{
	return launch(function, (struct grid){(unsigned int)width, (unsigned int)height, 1, 256, 1, 1}, NULL, NULL, false);
}

API CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
	return launch(function, (struct grid){(unsigned int)width, (unsigned int)height, 1, 256, 1, 1}, stream, NULL, false);
}

static CUresult host_function(CUstream stream, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);
	struct op op = {.kind = HOST};

	if (result)
		return result;
	return stream->capture ? record_op(stream->capture, &op, 1) : queue_op(stream, &op, NULL);
}

API CUresult cuLaunchHostFunc(CUstream stream, void (*function)(void *) UNUSED, void *data UNUSED)
{
	return host_function(stream, false);
}

API CUresult cuLaunchHostFunc_ptsz(CUstream stream, void (*function)(void *) UNUSED, void *data UNUSED)
{
	return host_function(stream, true);
}
