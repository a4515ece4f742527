// SPDX-License-Identifier: GPL-2.0
/*
 * A program with its runtime linked in statically: it names no CUDA symbol, is linked to no CUDA library, and reaches
 * the driver as libcudart_static does, by dlopen and cuGetProcAddress_v2.
 *
 * usage: static_runtime LAUNCHES [per-thread]. Prints "ready", waits for a line, launches, and prints how many it made.
 */
#define _GNU_SOURCE
#include "cuda_types.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define VERSION 13000
#define PER_THREAD_DEFAULT_STREAM 2

typedef CUresult (*get_t)(const char *, void **, int, uint64_t, int *);

/* The runtime's part. */
static struct {
	get_t get;
	uint64_t flags;
	void *module;
	CUresult (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
	CUresult (*init)(unsigned);
	CUresult (*retain)(void **, int);
	CUresult (*use)(void *);
	CUresult (*load)(void **, const void *, int *, void **, unsigned, int *, void **, unsigned);
	CUresult (*kernel)(void **, void *, const char *);
	CUresult (*synchronize)(void *);
} runtime;

static void *entry_point(const char *name)
{
	void *address = NULL;

	if (runtime.get(name, &address, VERSION, runtime.flags, NULL) || !address) {
		fprintf(stderr, "static_runtime: no %s\n", name);
		exit(1);
	}
	return address;
}

static void must(CUresult result, const char *what)
{
	if (result) {
		fprintf(stderr, "static_runtime: %s failed with %d\n", what, result);
		exit(1);
	}
}

static void runtime_start(void)
{
	static const char image[16] = "\177ELF";
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;

	if (!library) {
		fprintf(stderr, "static_runtime: %s\n", dlerror());
		exit(1);
	}
	*(void **)&runtime.get = dlsym(library, "cuGetProcAddress_v2");
	*(void **)&runtime.launch = entry_point("cuLaunchKernel");
	*(void **)&runtime.load = entry_point("cuLibraryLoadData");
	*(void **)&runtime.kernel = entry_point("cuLibraryGetKernel");
	*(void **)&runtime.synchronize = entry_point("cuStreamSynchronize");
	*(void **)&runtime.init = entry_point("cuInit");
	*(void **)&runtime.retain = entry_point("cuDevicePrimaryCtxRetain");
	*(void **)&runtime.use = entry_point("cuCtxSetCurrent");
	must(runtime.init(0), "cuInit");
	must(runtime.retain(&context, 0), "cuDevicePrimaryCtxRetain");
	must(runtime.use(context), "cuCtxSetCurrent");
	must(runtime.load(&runtime.module, image, NULL, NULL, 0, NULL, NULL, 0), "cuLibraryLoadData");
}

static CUresult launch_named(const char *name, unsigned blocks, unsigned threads, void *stream)
{
	static void *kernel;

	if (!kernel && runtime.kernel(&kernel, runtime.module, name))
		return 1;
	return runtime.launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, NULL, NULL);
}

int main(int argc, char **argv)
{
	long launches = argc > 1 ? atol(argv[1]) : 1, made = 0;

	if (argc > 2 && !strcmp(argv[2], "per-thread"))
		runtime.flags = PER_THREAD_DEFAULT_STREAM;
	runtime_start();
	printf("ready %d\n", getpid());
	fflush(stdout);
	if (getchar() == EOF)
		return 1;
	while (made < launches && !launch_named("_Z4axpyfPfS_", 7, 64, NULL))
		made++;
	runtime.synchronize(NULL);
	printf("%ld\n", made);
	return made != launches;
}
