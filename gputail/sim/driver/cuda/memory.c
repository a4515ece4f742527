/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Memory: which addresses are the device's and which are pinned. Device addresses are numbers without memory behind them,
 * handed out once; pinned and managed memory is real.
 */
#define _GNU_SOURCE
#include "driver.h"

#include <stdlib.h>
#include <sys/mman.h>

#define DEVICE_FIRST 0x100000000000ULL
#define DEVICE_LAST 0x200000000000ULL
#define ALLOC_NS (100 * US)
#define ALLOC_NS_PER_MB (10 * US)
#define FREE_NS (100 * US)
#define PAGE 0x200000ULL

enum use { DEVICE, PINNED, REGISTERED, MANAGED, RESERVED, PHYSICAL };

struct range {
	uint64_t address, bytes;
	enum use use;
	struct range *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct range *ranges;
static uint64_t next_address = DEVICE_FIRST + PAGE;

static bool lies_in(uint64_t address, enum use use)
{
	const struct range *range;
	bool found = false;

	pthread_mutex_lock(&lock);
	for (range = ranges; range && !found; range = range->next)
		found = range->use == use && address - range->address < range->bytes;
	pthread_mutex_unlock(&lock);
	return found;
}

bool is_device(CUdeviceptr address)
{
	return (address >= DEVICE_FIRST && address < DEVICE_LAST) || lies_in(address, MANAGED);
}

bool is_pinned(const void *address)
{
	return lies_in((uintptr_t)address, PINNED) || lies_in((uintptr_t)address, REGISTERED);
}

static CUresult add(uint64_t address, uint64_t bytes, enum use use)
{
	struct range *range = malloc(sizeof(*range));

	if (!range)
		return OUT_OF_MEMORY;
	pthread_mutex_lock(&lock);
	*range = (struct range){address, bytes, use, ranges};
	ranges = range;
	pthread_mutex_unlock(&lock);
	return SUCCESS;
}

/* Take a range out; 0 if there is none that begins there. */
static uint64_t take(uint64_t address, enum use use)
{
	struct range **at, *range;
	uint64_t bytes = 0;

	pthread_mutex_lock(&lock);
	for (at = &ranges; *at && ((*at)->address != address || (*at)->use != use); at = &(*at)->next)
		;
	range = *at;
	if (range) {
		bytes = range->bytes;
		*at = range->next;
		free(range);
	}
	pthread_mutex_unlock(&lock);
	return bytes;
}

/* Count memory of the device as taken, or with a negative size as free again; false: there is not so much. */
static bool account(int64_t bytes)
{
	uint64_t sum = 0;
	bool fits;
	uint32_t i;

	lock_gpu();
	for (i = 0; i < PROCESSES; i++)
		if (gpu->processes[i].pid && gpu->processes[i].device == gpu->processes[self].device)
			sum += gpu->processes[i].allocated_bytes;
	fits = bytes < 0 || sum + (uint64_t)bytes <= DEVICE_MEMORY_BYTES;
	if (fits)
		gpu->processes[self].allocated_bytes += (uint64_t)bytes;
	unlock_gpu();
	return fits;
}

static CUresult allocate(uint64_t *address, uint64_t bytes, enum use use)
{
	if (!gpu || !address || !bytes)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	if (use != RESERVED && (bytes > DEVICE_MEMORY_BYTES || !account((int64_t)bytes)))
		return OUT_OF_MEMORY;
	*address = __atomic_fetch_add(&next_address, (bytes + PAGE - 1) / PAGE * PAGE, __ATOMIC_RELAXED);
	return add(*address, bytes, use);
}

static CUresult allocate_slowly(uint64_t *address, uint64_t bytes)
{
	int64_t until_ns = now_ns() + ALLOC_NS + (int64_t)(bytes >> 20) * ALLOC_NS_PER_MB;
	CUresult result = allocate(address, bytes, DEVICE);

	if (!result)
		sleep_until(until_ns);
	return result;
}

/* The driver unmaps only what nothing on the device may still use. */
static CUresult release(CUdeviceptr address)
{
	uint64_t bytes;

	if (!gpu || !address)
		return gpu ? SUCCESS : NOT_INITIALIZED;
	wait_for_device();
	bytes = take(address, MANAGED);
	if (bytes)
		munmap((void *)(uintptr_t)address, bytes);
	else
		bytes = take(address, DEVICE);
	if (!bytes)
		return INVALID_VALUE;
	account(-(int64_t)bytes);
	sleep_until(now_ns() + FREE_NS);
	return SUCCESS;
}

API CUresult cuMemAlloc(CUdeviceptr_v1 *address, unsigned int bytes)
{
	uint64_t wide = 0;
	CUresult result = allocate_slowly(&wide, bytes);

	*address = (CUdeviceptr_v1)wide;
	return result;
}

API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) { return allocate_slowly((uint64_t *)address, bytes); }
API CUresult cuMemFree(CUdeviceptr_v1 address) { return release(DEVICE_FIRST | address); }
API CUresult cuMemFree_v2(CUdeviceptr address) { return release(address); }

static CUresult allocate_pitch(uint64_t *address, size_t *pitch, uint64_t width, uint64_t height)
{
	*pitch = (width + 511) / 512 * 512;
	return allocate_slowly(address, *pitch * height);
}

API CUresult cuMemAllocPitch(CUdeviceptr_v1 *address, unsigned int *pitch, unsigned int width, unsigned int height,
			     unsigned int element UNUSED)
{
	uint64_t wide = 0;
	size_t wide_pitch = 0;
	CUresult result = allocate_pitch(&wide, &wide_pitch, width, height);

	*address = (CUdeviceptr_v1)wide;
	*pitch = (unsigned int)wide_pitch;
	return result;
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *address, size_t *pitch, size_t width, size_t height, unsigned int element UNUSED)
{
	return allocate_pitch((uint64_t *)address, pitch, width, height);
}

/* Real memory, for the host to use: pinned, or managed and then counted as the device's too. */
static CUresult map_host(void **address, size_t bytes, enum use use)
{
	int64_t until_ns = now_ns() + ALLOC_NS + (int64_t)(bytes >> 20) * ALLOC_NS_PER_MB;
	CUresult result;
	void *mapped;

	if (!gpu || !bytes)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	if (use == MANAGED && (bytes > DEVICE_MEMORY_BYTES || !account((int64_t)bytes)))
		return OUT_OF_MEMORY;
	mapped = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (mapped == MAP_FAILED)
		return OUT_OF_MEMORY;
	*address = mapped;
	result = add((uintptr_t)mapped, bytes, use);
	sleep_until(until_ns);
	return result;
}

API CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags UNUSED)
{
	void *mapped = NULL;
	CUresult result = map_host(&mapped, bytes, MANAGED);

	*address = (uintptr_t)mapped;
	return result;
}

API CUresult cuMemAllocHost(void **address, unsigned int bytes) { return map_host(address, bytes, PINNED); }
API CUresult cuMemAllocHost_v2(void **address, size_t bytes) { return map_host(address, bytes, PINNED); }
API CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags UNUSED) { return map_host(address, bytes, PINNED); }

API CUresult cuMemFreeHost(void *address)
{
	uint64_t bytes;

	if (!gpu)
		return NOT_INITIALIZED;
	wait_for_device();
	bytes = take((uintptr_t)address, PINNED);
	if (!bytes)
		return INVALID_VALUE;
	munmap(address, bytes);
	sleep_until(now_ns() + FREE_NS);
	return SUCCESS;
}

static CUresult pin(void *address, size_t bytes)
{
	if (!gpu || !bytes)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	sleep_until(now_ns() + ALLOC_NS + (int64_t)(bytes >> 20) * ALLOC_NS_PER_MB);
	return add((uintptr_t)address, bytes, REGISTERED);
}

API CUresult cuMemHostRegister(void *address, size_t bytes, unsigned int flags UNUSED) { return pin(address, bytes); }
API CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags UNUSED) { return pin(address, bytes); }

API CUresult cuMemHostUnregister(void *address)
{
	if (!gpu)
		return NOT_INITIALIZED;
	wait_for_device();
	return take((uintptr_t)address, REGISTERED) ? SUCCESS : INVALID_VALUE;
}
