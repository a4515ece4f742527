/* SPDX-License-Identifier: GPL-2.0 */
/* Initialisation, devices and contexts. All contexts of a process share its place on the GPU. */
#include "driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 16

struct CUctx_st {
	unsigned int flags;
	CUdevice device;
};

static struct CUctx_st primary;
static __thread CUcontext stack[DEPTH];
static __thread int depth;

CUresult check_context(void)
{
	run_hook();
	return gpu ? SUCCESS : NOT_INITIALIZED;
}

API CUresult cuInit(unsigned int flags UNUSED)
{
	return attach() ? OUT_OF_MEMORY : SUCCESS;
}

API CUresult cuDriverGetVersion(int *version)
{
	*version = 13000;
	return SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	if (!gpu)
		return NOT_INITIALIZED;
	*device = 0;
	return ordinal ? INVALID_DEVICE : SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
	*count = 1;
	return check_context();
}

API CUresult cuDeviceGetName(char *name, int size, CUdevice device UNUSED)
{
	if (size > 0)
		snprintf(name, (size_t)size, "gputail simulated GPU");
	return check_context();
}

static CUresult set_current(CUcontext context)
{
	if (!gpu)
		return NOT_INITIALIZED;
	if (!depth)
		depth = 1;
	stack[depth - 1] = context;
	return SUCCESS;
}

static CUresult push_current(CUcontext context)
{
	if (!gpu || depth == DEPTH)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	stack[depth++] = context;
	return SUCCESS;
}

static CUresult pop_current(CUcontext *context)
{
	if (!depth)
		return INVALID_CONTEXT;
	depth--;
	if (context)
		*context = stack[depth];
	return SUCCESS;
}

static CUresult create(CUcontext *context, unsigned int flags, CUdevice device)
{
	CUcontext new = calloc(1, sizeof(*new));

	if (!gpu || !new)
		return gpu ? OUT_OF_MEMORY : NOT_INITIALIZED;
	*new = (struct CUctx_st){flags, device};
	*context = new;
	return push_current(new);
}

static CUresult destroy(CUcontext context)
{
	if (!gpu || !context)
		return gpu ? INVALID_CONTEXT : NOT_INITIALIZED;
	wait_for_device();
	if (depth && stack[depth - 1] == context)
		depth--;
	if (context != &primary)
		free(context);
	return SUCCESS;
}

API CUresult cuCtxSetCurrent(CUcontext context) { return set_current(context); }
API CUresult cuCtxPushCurrent(CUcontext context) { return push_current(context); }
API CUresult cuCtxPushCurrent_v2(CUcontext context) { return push_current(context); }
API CUresult cuCtxPopCurrent(CUcontext *context) { return pop_current(context); }
API CUresult cuCtxPopCurrent_v2(CUcontext *context) { return pop_current(context); }

API CUresult cuCtxGetCurrent(CUcontext *context)
{
	*context = depth ? stack[depth - 1] : NULL;
	return check_context();
}

API CUresult cuCtxGetDevice(CUdevice *device)
{
	*device = 0;
	return check_context();
}

API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device UNUSED)
{
	*context = &primary;
	return check_context();
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice device UNUSED) { return check_context(); }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device UNUSED) { return check_context(); }

API CUresult cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device) { return create(context, flags, device); }
API CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) { return create(context, flags, device); }

API CUresult cuCtxCreate_v3(CUcontext *context, void *affinity UNUSED, int count UNUSED, unsigned int flags, CUdevice device)
{
	return create(context, flags, device);
}

API CUresult cuCtxCreate_v4(CUcontext *context, void *params UNUSED, unsigned int flags, CUdevice device)
{
	return create(context, flags, device);
}

API CUresult cuCtxDestroy(CUcontext context) { return destroy(context); }
API CUresult cuCtxDestroy_v2(CUcontext context) { return destroy(context); }

API CUresult cuCtxSynchronize(void)
{
	if (!gpu)
		return NOT_INITIALIZED;
	wait_for_device();
	return SUCCESS;
}

API CUresult cuCtxSynchronize_v2(CUcontext context UNUSED)
{
	if (!gpu)
		return NOT_INITIALIZED;
	wait_for_device();
	return SUCCESS;
}
