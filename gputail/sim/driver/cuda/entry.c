/* SPDX-License-Identifier: GPL-2.0 */
/* Finding entry points by name, as the runtime does, and the names of errors. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define PER_THREAD_DEFAULT_STREAM 2

/* Versions of a function that came later than CUDA 3.2, the newest first; all others' newest is what every caller wants. */
static const struct newer {
	const char *name;
	int since;
	const char *symbol;
} newer[] = {
	{"cuCtxSynchronize", 13000, "cuCtxSynchronize_v2"},
	{"cuCtxCreate", 13000, "cuCtxCreate_v4"},
	{"cuMemPrefetchAsync", 13000, "cuMemPrefetchAsync_v2"},
	{"cuEventElapsedTime", 13000, "cuEventElapsedTime_v2"},
	{"cuGraphInstantiate", 12000, "cuGraphInstantiateWithFlags"},
	{"cuGraphInstantiate", 11000, "cuGraphInstantiate_v2"},
	{"cuGraphExecUpdate", 12000, "cuGraphExecUpdate_v2"},
	{"cuGraphAddKernelNode", 12000, "cuGraphAddKernelNode_v2"},
	{"cuGetProcAddress", 12000, "cuGetProcAddress_v2"},
	{"cuStreamBeginCapture", 10010, "cuStreamBeginCapture_v2"},
	{"cuCtxSynchronize", 0, "cuCtxSynchronize"},
	{"cuCtxCreate", 0, "cuCtxCreate_v2"},
	{"cuMemPrefetchAsync", 0, "cuMemPrefetchAsync"},
	{"cuEventElapsedTime", 0, "cuEventElapsedTime"},
	{"cuGraphInstantiate", 0, "cuGraphInstantiate"},
	{"cuGraphExecUpdate", 0, "cuGraphExecUpdate"},
	{"cuGraphAddKernelNode", 0, "cuGraphAddKernelNode"},
	{"cuGetProcAddress", 0, "cuGetProcAddress"},
	{"cuStreamBeginCapture", 0, "cuStreamBeginCapture"},
};

static void *own_symbol(const char *name, const char *suffix)
{
	static void *library;
	char symbol[256];
	Dl_info info;

	if (!library && dladdr(own_symbol, &info))
		library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
	if (!library || (size_t)snprintf(symbol, sizeof(symbol), "%s%s", name, suffix) >= sizeof(symbol))
		return NULL;
	return dlsym(library, symbol);
}

static CUresult find(const char *name, void **function, int version, unsigned long long flags)
{
	static const char *const per_thread[] = {"_ptsz", "_ptds"};
	size_t i;
	void *found = NULL;
	const char *wide = "_v2";

	if (!name || !function || strncmp(name, "cu", 2))
		return INVALID_VALUE;
	for (i = 0; i < sizeof(newer) / sizeof(*newer); i++)
		if (!strcmp(newer[i].name, name) && version >= newer[i].since) {
			name = newer[i].symbol;
			wide = "";
			break;
		}
	for (i = 0; i < 2 && !found && flags & PER_THREAD_DEFAULT_STREAM; i++) {
		char both[16];

		snprintf(both, sizeof(both), "%s%s", wide, per_thread[i]);
		found = own_symbol(name, both);
		if (!found)
			found = own_symbol(name, per_thread[i]);
	}
	if (!found)
		found = own_symbol(name, wide);
	if (!found)
		found = own_symbol(name, "");
	*function = found;
	return found ? SUCCESS : NOT_FOUND;
}

API CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags)
{
	return find(name, function, version, flags);
}

API CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status)
{
	CUresult result = find(name, function, version, flags);

	if (status)
		*status = result ? 1 : 0;
	return result;
}

static const struct {
	CUresult result;
	const char *name, *text;
} errors[] = {
	{SUCCESS, "CUDA_SUCCESS", "no error"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{FILE_NOT_FOUND, "CUDA_ERROR_FILE_NOT_FOUND", "file not found"},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
};

API CUresult cuGetErrorName(CUresult result, const char **name)
{
	size_t i;

	for (i = 0; i < sizeof(errors) / sizeof(*errors); i++)
		if (errors[i].result == result) {
			*name = errors[i].name;
			return SUCCESS;
		}
	*name = NULL;
	return INVALID_VALUE;
}

API CUresult cuGetErrorString(CUresult result, const char **text)
{
	size_t i;

	for (i = 0; i < sizeof(errors) / sizeof(*errors); i++)
		if (errors[i].result == result) {
			*text = errors[i].text;
			return SUCCESS;
		}
	*text = NULL;
	return INVALID_VALUE;
}
