/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Calls the bare libcuda in a loop. usage: caller launch|sync|request CALLS_PER_ROUND [CALLS_PER_SECOND]
 * For each line on standard input one round: prints the nanoseconds that it took. At CALLS_PER_SECOND, 0 for as fast as
 * it goes, calls are spread evenly in steps of a millisecond. A request is launches and then one synchronization.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
		   void *stream, void **params, void **extra);
int cuStreamSynchronize(void *stream);

static long long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void call(const char *what, long times)
{
	long i;

	if (strcmp(what, "sync"))
		for (i = 0; i < times; i++)
			cuLaunchKernel((void *)0xabc, 3, 5, 7, 2, 11, 13, 0, (void *)0x77, 0, 0);
	else
		for (i = 0; i < times; i++)
			cuStreamSynchronize((void *)0x77);
	if (!strcmp(what, "request"))
		cuStreamSynchronize((void *)0x77);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "launch";
	long calls = argc > 2 ? atol(argv[2]) : 100000, rate = argc > 3 ? atol(argv[3]) : 0;
	int is_request = !strcmp(what, "request");
	char line[64];

	while (fgets(line, sizeof(line), stdin)) {
		long long start = now(), step;
		long done = 0;

		if (!rate)
			call(what, calls);
		for (step = 1; rate && done < calls; step++) {
			long until = rate * step / 1000 < calls ? rate * step / 1000 : calls;

			call(is_request ? "launch" : what, until - done);
			done = until;
			while (now() < start + step * 1000000LL)
				;
		}
		if (rate && is_request)
			cuStreamSynchronize((void *)0x77);
		printf("%lld\n", now() - start);
		fflush(stdout);
	}
	return 0;
}
