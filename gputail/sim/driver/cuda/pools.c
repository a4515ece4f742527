/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Memory of pools, handed out in a stream's order and quickly, and the calls that reserve addresses and map memory to them.
 * Neither waits for the device. What they hand out are numbers of the device's range that nothing checks.
 */
#include "driver.h"

#include <stdlib.h>

#define FIRST 0x180000000000ULL
#define PAGE 0x200000ULL
#define CREATE_NS (100 * US)
#define CREATE_NS_PER_MB (10 * US)
#define MAP_NS (20 * US)

typedef struct CUmemPool_st *CUmemoryPool;
typedef unsigned long long CUmemGenericAllocationHandle;

struct CUmemPool_st {
	int unused;
};

static uint64_t next_address = FIRST;

static CUresult hand_out(unsigned long long *address, size_t bytes)
{
	if (!gpu || !bytes)
		return gpu ? INVALID_VALUE : NOT_INITIALIZED;
	*address = __atomic_fetch_add(&next_address, (bytes + PAGE - 1) / PAGE * PAGE, __ATOMIC_RELAXED);
	return SUCCESS;
}

static CUresult take_time(int64_t ns)
{
	if (!gpu)
		return NOT_INITIALIZED;
	sleep_until(now_ns() + ns);
	return SUCCESS;
}

API CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream UNUSED) { return hand_out(address, bytes); }
API CUresult cuMemAllocAsync_ptsz(CUdeviceptr *address, size_t bytes, CUstream stream UNUSED) { return hand_out(address, bytes); }

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool UNUSED, CUstream stream UNUSED)
{
	return hand_out(address, bytes);
}

API CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *address, size_t bytes, CUmemoryPool pool UNUSED, CUstream stream UNUSED)
{
	return hand_out(address, bytes);
}

API CUresult cuMemFreeAsync(CUdeviceptr address UNUSED, CUstream stream UNUSED) { return check_context(); }
API CUresult cuMemFreeAsync_ptsz(CUdeviceptr address UNUSED, CUstream stream UNUSED) { return check_context(); }

API CUresult cuMemPoolCreate(CUmemoryPool *pool, const void *properties UNUSED)
{
	*pool = calloc(1, sizeof(**pool));
	return *pool ? check_context() : OUT_OF_MEMORY;
}

API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
	free(pool);
	return check_context();
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool UNUSED, size_t keep UNUSED) { return take_time(MAP_NS); }

API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const void *properties UNUSED,
			 unsigned long long flags UNUSED)
{
	CUresult result = hand_out(handle, bytes);

	return result ? result : take_time(CREATE_NS + (int64_t)(bytes >> 20) * CREATE_NS_PER_MB);
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle UNUSED) { return take_time(MAP_NS); }

API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment UNUSED, CUdeviceptr wanted UNUSED,
				 unsigned long long flags UNUSED)
{
	return hand_out(address, bytes);
}

API CUresult cuMemAddressFree(CUdeviceptr address UNUSED, size_t bytes UNUSED) { return check_context(); }

API CUresult cuMemMap(CUdeviceptr address UNUSED, size_t bytes UNUSED, size_t offset UNUSED,
		      CUmemGenericAllocationHandle handle UNUSED, unsigned long long flags UNUSED)
{
	return take_time(MAP_NS);
}

API CUresult cuMemUnmap(CUdeviceptr address UNUSED, size_t bytes UNUSED) { return take_time(MAP_NS); }

API CUresult cuMemSetAccess(CUdeviceptr address UNUSED, size_t bytes UNUSED, const void *access UNUSED, size_t count UNUSED)
{
	return take_time(MAP_NS);
}
