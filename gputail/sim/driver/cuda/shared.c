/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The memory shared by the GPU's processes: its file, its lock, who takes part in it, and the log of what ran.
 *
 * GPUTAIL_SIM_GPU   the file (default /dev/shm/gputail-sim-UID)
 * GPUTAIL_SIM_LOG   a file to which a line is added for each operation that ends, whoever queued it; the first process
 *		     to name one decides: pid stream kind queued_ns start_ns end_ns work
 */
#define _GNU_SOURCE
#include "gpu.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define VERSION (0x677075000000ULL + sizeof(struct gpu)) /* of the layout */
#define REAP_NS (5 * MS)

struct gpu *gpu;
uint32_t self;

static pthread_mutex_t attaching = PTHREAD_MUTEX_INITIALIZER;
static char log_lines[1 << 16];
static size_t log_used;
static int log_file = -1;

int64_t now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* When a process started, in ticks since boot; 0 if there is none, or only its corpse. */
static uint64_t start_time(pid_t pid)
{
	char path[32], text[1024], *field;
	ssize_t size;
	int file, i;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return 0;
	size = read(file, text, sizeof(text) - 1);
	close(file);
	if (size <= 0)
		return 0;
	text[size] = 0;
	field = strrchr(text, ')'); /* field 2; the state is field 3, the start time field 22 */
	if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X')
		return 0;
	for (i = 0; field && i < 20; i++)
		field = strchr(field + 1, ' ');
	return field ? strtoull(field + 1, NULL, 10) : 0;
}

static void initialise(struct gpu *new)
{
	pthread_mutexattr_t attributes;
	uint32_t i;

	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&new->mutex, &attributes);
	for (i = 0; i < STREAMS; i++)
		new->queues[i].process = NONE;
	for (i = 0; i < EVENTS; i++)
		new->events[i].process = NONE;
	new->now_ns = now_ns();
	new->version = VERSION;
}

/* Map the file, made and initialised by whoever comes first; one of another layout is replaced. */
static struct gpu *map_gpu(void)
{
	const char *named = getenv("GPUTAIL_SIM_GPU");
	struct gpu *mapped = MAP_FAILED;
	char path[256];
	struct stat status;
	int file, tries;

	if (named && *named)
		snprintf(path, sizeof(path), "%s", named);
	else
		snprintf(path, sizeof(path), "/dev/shm/gputail-sim-%u", getuid());
	for (tries = 0; tries < 3; tries++) {
		file = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
		if (file < 0 || flock(file, LOCK_EX))
			break;
		if (fstat(file, &status) || (!status.st_size && ftruncate(file, sizeof(struct gpu))))
			break;
		if (!status.st_size || status.st_size == sizeof(struct gpu))
			mapped = mmap(NULL, sizeof(struct gpu), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		if (mapped != MAP_FAILED && !mapped->version)
			initialise(mapped);
		if (mapped != MAP_FAILED && mapped->version == VERSION)
			break;
		if (mapped != MAP_FAILED)
			munmap(mapped, sizeof(struct gpu));
		mapped = MAP_FAILED;
		unlink(path);
		close(file);
		file = -1;
	}
	if (file >= 0) {
		flock(file, LOCK_UN); /* closing is not enough: the mapping holds the file open */
		close(file);
	}
	return mapped == MAP_FAILED ? NULL : mapped;
}

/* As the real driver does, hold the device's file open: nvidiaN beside the GPU's own file, if somebody put it there. */
static void open_device(uint32_t device)
{
	const char *named = getenv("GPUTAIL_SIM_GPU"), *slash = named ? strrchr(named, '/') : NULL;
	static int file = -1;
	char path[256];

	if (!slash || file >= 0)
		return;
	snprintf(path, sizeof(path), "%.*s/nvidia%u", (int)(slash - named), named, device);
	file = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
}

static void reap(void)
{
	uint32_t i;

	for (i = 0; i < PROCESSES; i++) {
		const struct process *process = &gpu->processes[i];

		if (!process->pid || (i == self && process->pid == getpid()))
			continue;
		if ((kill(process->pid, 0) && errno == ESRCH) || start_time(process->pid) != process->start_time)
			drop(gpu, i);
	}
	gpu->reaped_ns = gpu->now_ns;
}

static bool open_log(const struct gpu *of)
{
	if (log_file < 0 && of->log[0])
		log_file = open(of->log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	return log_file >= 0;
}

/* Lines that were written in part, by a process killed at it or to a full disk: the next would go on in the middle of one. */
static void trim_log(const struct gpu *of)
{
	if (open_log(of) && ftruncate(log_file, of->log_size))
		perror("simulated GPU: log");
}

void flush_log(struct gpu *of)
{
	size_t written = 0;

	if (!log_used)
		return;
	while (open_log(of) && written < log_used) {
		ssize_t size = write(log_file, log_lines + written, log_used - written);

		if (size <= 0)
			break;
		written += (size_t)size;
	}
	if (written == log_used)
		of->log_size += (off_t)written;
	else
		trim_log(of);
	log_used = 0;
}

void lock_gpu(void)
{
	int64_t now;

	if (pthread_mutex_lock(&gpu->mutex) == EOWNERDEAD) {
		repair(gpu);
		trim_log(gpu);
		pthread_mutex_consistent(&gpu->mutex);
		gpu->reaped_ns = 0;
	}
	now = now_ns();
	if (now - gpu->reaped_ns > REAP_NS)
		reap();
	advance(gpu, now);
}

void unlock_gpu(void)
{
	flush_log(gpu);
	pthread_mutex_unlock(&gpu->mutex);
}

void log_op(const struct gpu *of, uint32_t stream, const struct op *op)
{
	static const char *const kinds[] = {"kernel", "graph", "memset",   "DtoD",	 "HtoD", "DtoH",
					    "event",  "wait",  "hostfunc", "collective", "send", "recv"};
	const struct queue *queue = &of->queues[stream];

	if (!of->log[0])
		return;
	if (log_used > sizeof(log_lines) - 256)
		flush_log(gpu);
	log_used += (size_t)snprintf(log_lines + log_used, sizeof(log_lines) - log_used, "%d %#llx %s %lld %lld %lld %.0f\n",
				     of->processes[queue->process].pid, (unsigned long long)queue->handle, kinds[op->kind],
				     (long long)op->queued_ns, (long long)op->start_ns, (long long)of->now_ns, op->work);
}

static int join(void)
{
	const char *log = getenv("GPUTAIL_SIM_LOG"), *device = getenv("CUDA_VISIBLE_DEVICES");
	uint64_t started = start_time(getpid());
	uint32_t slot, i;
	struct stat before;

	self = NONE;
	lock_gpu();
	for (i = 0; i < PROCESSES; i++) /* what this process was before an exec */
		if (gpu->processes[i].pid == getpid())
			drop(gpu, i);
	for (slot = 0; slot < PROCESSES && gpu->processes[slot].pid; slot++)
		;
	for (i = 0; i < STREAMS && gpu->queues[i].process != NONE; i++)
		;
	if (slot < PROCESSES && i < STREAMS) {
		gpu->processes[slot] = (struct process){getpid(), started, .legacy = i};
		if (device)
			gpu->processes[slot].device = (uint32_t)strtoul(device, NULL, 10) % DEVICES;
		gpu->queues[i] = (struct queue){gpu->queues[i].tail, gpu->queues[i].tail, .process = slot, .legacy = true};
		self = slot;
		open_device(gpu->processes[slot].device);
	}
	if (log && *log && !gpu->log[0]) {
		snprintf(gpu->log, sizeof(gpu->log), "%s", log);
		gpu->log_size = !stat(log, &before) ? before.st_size : 0;
	}
	unlock_gpu();
	return self == NONE ? ENOSPC : 0;
}

/* A child has no part in what its parent does on the GPU. */
static void after_fork(void)
{
	gpu = NULL;
	log_used = 0;
}

/* Take part in the GPU; 0, or an errno. */
int attach(void)
{
	static bool registered;
	int error = 0;

	pthread_mutex_lock(&attaching);
	if (!gpu) {
		gpu = map_gpu();
		error = gpu ? join() : ENOENT;
		if (error)
			gpu = NULL;
		if (!error && !registered)
			registered = !pthread_atfork(NULL, NULL, after_fork);
	}
	pthread_mutex_unlock(&attaching);
	return error;
}

__attribute__((destructor)) static void leave(void)
{
	if (!gpu)
		return;
	lock_gpu();
	drop(gpu, self);
	unlock_gpu();
}
