/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Modules and libraries: loading takes the caller's time, ten times as much of it for PTX, which is compiled. Any name is
 * found in any module; the image is only measured, never read further.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <elf.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define LOAD_NS (2 * MS)
#define LOAD_NS_PER_BYTE 10 /* a millisecond for 100 kB */
#define PTX_FACTOR 10
#define UNLOAD_NS (100 * US)
#define LONGEST_TEXT (64UL << 20)
#define LONGEST_NAME 4096
#define FATBIN 0xba55ed50u
#define FATBIN_WRAPPER 0x466243b1u

typedef CUmodule CUlibrary;
typedef CUfunction CUkernel;

struct CUmod_st {
	CUfunction functions;
};

struct wrapper {
	uint32_t magic, version;
	const void *data, *more;
};

struct fatbin {
	uint32_t magic;
	uint16_t version, header_bytes;
	uint64_t bytes;
};

struct linking {
	size_t bytes;
	bool is_ptx;
	char image[64];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static bool is_ptx(const char *image)
{
	return !strncmp(image, "//", 2) || !strncmp(image, ".version", 8);
}

static size_t image_bytes(const void *image)
{
	if (!memcmp(image, ELFMAG, SELFMAG)) {
		const Elf64_Ehdr *elf = image;

		return elf->e_shoff + (size_t)elf->e_shnum * elf->e_shentsize;
	}
	if (*(const uint32_t *)image == FATBIN) {
		const struct fatbin *fatbin = image;

		return fatbin->header_bytes + fatbin->bytes;
	}
	return strnlen(image, LONGEST_TEXT);
}

static void take_time(size_t bytes, bool ptx)
{
	burn_until(now_ns() + (LOAD_NS + (int64_t)bytes * LOAD_NS_PER_BYTE) * (ptx ? PTX_FACTOR : 1));
}

static CUresult load(CUmodule *module, const void *image)
{
	if (!gpu || !module || !image)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	if (*(const uint32_t *)image == FATBIN_WRAPPER)
		image = ((const struct wrapper *)image)->data;
	*module = calloc(1, sizeof(**module));
	if (!*module)
		return OUT_OF_MEMORY;
	take_time(image_bytes(image), is_ptx(image));
	return SUCCESS;
}

static CUresult load_file(CUmodule *module, const char *path)
{
	struct stat status;

	if (!gpu || !module)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	if (stat(path, &status))
		return FILE_NOT_FOUND;
	*module = calloc(1, sizeof(**module));
	if (!*module)
		return OUT_OF_MEMORY;
	take_time((size_t)status.st_size, strlen(path) > 4 && !strcmp(path + strlen(path) - 4, ".ptx"));
	return SUCCESS;
}

/* Handles of functions stay good: programs keep them, as do launches under way. */
static CUresult unload(CUmodule module)
{
	if (!gpu || !module)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	sleep_until(now_ns() + UNLOAD_NS);
	free(module);
	return SUCCESS;
}

static CUresult find(CUfunction *function, CUmodule module, const char *name)
{
	CUfunction found;

	if (!gpu || !module || !name)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	pthread_mutex_lock(&lock);
	for (found = module->functions; found && strcmp(found->name, name); found = found->next)
		;
	if (!found) {
		found = malloc(sizeof(*found));
		if (found) {
			*found = (struct CUfunc_st){module, strndup(name, LONGEST_NAME), module->functions};
			module->functions = found;
		}
	}
	pthread_mutex_unlock(&lock);
	*function = found;
	return found ? SUCCESS : OUT_OF_MEMORY;
}

API CUresult cuModuleLoad(CUmodule *module, const char *path) { return load_file(module, path); }
API CUresult cuModuleLoadData(CUmodule *module, const void *image) { return load(module, image); }

API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count UNUSED, int *options UNUSED, void **values UNUSED)
{
	return load(module, image);
}

API CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) { return load(module, image); }
API CUresult cuModuleUnload(CUmodule module) { return unload(module); }
API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { return find(function, module, name); }

API CUresult cuLibraryLoadData(CUlibrary *library, const void *image, int *jit_options UNUSED, void **jit_values UNUSED,
			       unsigned int jit_count UNUSED, int *options UNUSED, void **values UNUSED, unsigned int count UNUSED)
{
	return load(library, image);
}

API CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *jit_options UNUSED, void **jit_values UNUSED,
				   unsigned int jit_count UNUSED, int *options UNUSED, void **values UNUSED, unsigned int count UNUSED)
{
	return load_file(library, path);
}

API CUresult cuLibraryUnload(CUlibrary library) { return unload(library); }
API CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) { return find(kernel, library, name); }

API CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
	*function = kernel;
	return kernel ? check_context() : INVALID_HANDLE;
}

API CUresult cuFuncGetName(const char **name, CUfunction function)
{
	*name = function ? function->name : NULL;
	return function ? check_context() : INVALID_HANDLE;
}

API CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
	*name = kernel ? kernel->name : NULL;
	return kernel ? check_context() : INVALID_HANDLE;
}

API CUresult cuFuncLoad(CUfunction function) { return function ? check_context() : INVALID_HANDLE; }

static CUresult link_create(struct linking **state)
{
	*state = calloc(1, sizeof(**state));
	return *state ? check_context() : OUT_OF_MEMORY;
}

static CUresult link_add(struct linking *state, size_t bytes, bool ptx)
{
	if (!gpu || !state)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	state->bytes += bytes;
	take_time(bytes, ptx);
	return SUCCESS;
}

static CUresult link_add_file(struct linking *state, int type, const char *path)
{
	struct stat status;

	return stat(path, &status) ? FILE_NOT_FOUND : link_add(state, (size_t)status.st_size, type == 1);
}

#define OPTIONS unsigned int count UNUSED, int *options UNUSED, void **values UNUSED

API CUresult cuLinkCreate(OPTIONS, struct linking **state) { return link_create(state); }
API CUresult cuLinkCreate_v2(OPTIONS, struct linking **state) { return link_create(state); }

API CUresult cuLinkAddData(struct linking *state, int type, void *data UNUSED, size_t bytes, const char *name UNUSED, OPTIONS)
{
	return link_add(state, bytes, type == 1);
}

API CUresult cuLinkAddData_v2(struct linking *state, int type, void *data UNUSED, size_t bytes, const char *name UNUSED, OPTIONS)
{
	return link_add(state, bytes, type == 1);
}

API CUresult cuLinkAddFile(struct linking *state, int type, const char *path, OPTIONS) { return link_add_file(state, type, path); }
API CUresult cuLinkAddFile_v2(struct linking *state, int type, const char *path, OPTIONS) { return link_add_file(state, type, path); }

API CUresult cuLinkComplete(struct linking *state, void **image, size_t *bytes)
{
	if (!gpu || !state)
		return gpu ? INVALID_HANDLE : NOT_INITIALIZED;
	memcpy(state->image, "linked", 7);
	take_time(state->bytes, false);
	*image = state->image;
	if (bytes)
		*bytes = sizeof(state->image);
	return SUCCESS;
}

API CUresult cuLinkDestroy(struct linking *state)
{
	free(state);
	return check_context();
}
