// SPDX-License-Identifier: GPL-2.0
/*
 * Makes exactly the calls that it is told to. A command a line on standard input; one line of JSON each as the answer.
 *
 *   load [LIBRARY]                     dlopen, libcuda.so.1 unless told otherwise
 *   call SYMBOL N ARG...               N calls on the main thread
 *   threads T SYMBOL N ARG...          N calls on each of T threads
 *   fork P SYMBOL N ARG...             N calls in each of P forked children
 *   exec SYMBOL N ARG...               N calls in a child that has executed this program anew
 *   nest N NS OUTER ARG... / INNER ARG...   N calls of OUTER, each computing for NS and then calling INNER inside
 *   longjmp SYMBOL N ARG...            N calls, each left by longjmp before it returns
 *   threadexit T SYMBOL ARG...         T threads, each ending inside its call
 *   seccomp SYMBOL N ARG...            N calls in a forked child that the kernel kills for any system call but read, write and exit
 *   fibers F SYMBOL N ARG...           N calls on each of F stacks that one thread switches between after every call
 *   hold SYMBOL 1 ARG... / release     a thread stays inside a call until `release`
 *   new NAME HEX | get NAME            set or read a variable
 *   quit
 *
 * ARG: a number; $NAME, a variable's value; &NAME, its address, for what a call returns through a pointer; 'text, a
 * string; buf:BYTES, host memory; params:NS, kernel parameters asking for that run time; config:GX,GY,GZ,BX,BY,BZ,SHARED,STREAM;
 * list:GX,...,STREAM,FUNCTION; copy2d:SRC,DST,WIDTH,HEIGHT and copy2d1: (memory types; the second as up to CUDA 3.1);
 * copy3d:SRC,DST,WIDTH,HEIGHT,DEPTH and copy3d1:. Numbers inside these may be $NAME too. id:N is a 128-byte NCCL id by value.
 */
#define _GNU_SOURCE
#include "cuda_types.h"

#include <dlfcn.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARGS = 12, TOKENS = 48, VARIABLES = 64, LIBRARIES = 8, THREADS = 256 };

typedef uint64_t word;
typedef int (*function_t)(word, word, word, word, word, word, word, word, word, word, word, word);
struct id {
	char bytes[128];
};

struct request { /* one call, ready to be made */
	const char *symbol;
	function_t function;
	word args[ARGS];
	int count;
	struct id *id; /* by value, the third argument of ncclCommInitRank */
	long times;
};

static struct {
	char name[32];
	word value;
} variables[VARIABLES];
static void *libraries[LIBRARIES];
static int library_count;
static char **arguments;
static const char *problem;

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static word *variable(const char *name)
{
	int i;

	for (i = 0; i < VARIABLES; i++) {
		if (!variables[i].name[0])
			snprintf(variables[i].name, sizeof(variables[i].name), "%s", name);
		if (!strcmp(variables[i].name, name))
			return &variables[i].value;
	}
	problem = "too many variables";
	return &variables[0].value;
}

static void *find(const char *symbol)
{
	void *address = NULL;
	int i;

	for (i = 0; i < library_count && !address; i++)
		address = dlsym(libraries[i], symbol);
	if (!address)
		problem = "no loaded library has this symbol";
	return address;
}

static word number(const char *text)
{
	return *text == '$' ? *variable(text + 1) : strtoull(text, NULL, 0);
}

/* "1,2,$f": the numbers, how many at most `room`. */
static void numbers(const char *text, word *out, int room)
{
	char copy[512], *rest = copy, *piece;

	snprintf(copy, sizeof(copy), "%s", text);
	memset(out, 0, room * sizeof(*out));
	while (room-- && (piece = strsep(&rest, ",")))
		*out++ = number(piece);
}

static word launch_config(const char *text)
{
	CUlaunchConfig *config = calloc(1, sizeof(*config));
	word n[8];

	numbers(text, n, 8);
	*config = (CUlaunchConfig){n[0], n[1], n[2], n[3], n[4], n[5], n[6], (void *)n[7], NULL, 0};
	return (word)config;
}

static word launch_list(const char *text)
{
	CUDA_LAUNCH_PARAMS *list = calloc(1, sizeof(*list));
	word n[9];

	numbers(text, n, 9);
	*list = (CUDA_LAUNCH_PARAMS){(void *)n[8], n[0], n[1], n[2], n[3], n[4], n[5], n[6], (void *)n[7], NULL};
	return (word)list;
}

static word kernel_params(const char *text)
{
	word *run_ns = malloc(sizeof(*run_ns));
	void **params = calloc(2, sizeof(*params));

	*run_ns = number(text);
	params[0] = run_ns;
	return (word)params;
}

#define COPY_STRUCT(name, type, depth)                                                                                         \
	static word name(const char *text)                                                                                     \
	{                                                                                                                      \
		type *copy = calloc(1, sizeof(*copy));                                                                         \
		word n[5];                                                                                                     \
                                                                                                                               \
		numbers(text, n, 5);                                                                                           \
		copy->srcMemoryType = n[0];                                                                                    \
		copy->dstMemoryType = n[1];                                                                                    \
		copy->srcHost = copy->dstHost = malloc(4096);                                                                  \
		copy->WidthInBytes = n[2];                                                                                     \
		copy->Height = n[3];                                                                                           \
		depth;                                                                                                         \
		return (word)copy;                                                                                             \
	}
COPY_STRUCT(copy_2d, CUDA_MEMCPY2D, )
COPY_STRUCT(copy_2d_v1, CUDA_MEMCPY2D_v1, )
COPY_STRUCT(copy_3d, CUDA_MEMCPY3D, copy->Depth = n[4])
COPY_STRUCT(copy_3d_v1, CUDA_MEMCPY3D_v1, copy->Depth = n[4])

static word host_buffer(const char *text)
{
	return (word)calloc(1, number(text));
}

static word string_of(const char *text)
{
	return (word)strdup(text);
}

static const struct {
	const char *prefix;
	word (*make)(const char *text);
} makers[] = {
	{"params:", kernel_params}, {"config:", launch_config}, {"list:", launch_list}, {"copy2d:", copy_2d},   {"copy2d1:", copy_2d_v1},
	{"copy3d:", copy_3d},	    {"copy3d1:", copy_3d_v1},	{"buf:", host_buffer},	{"'", string_of},
};

static word argument(const char *text)
{
	size_t i;

	if (*text == '&')
		return (word)variable(text + 1);
	for (i = 0; i < sizeof(makers) / sizeof(makers[0]); i++)
		if (!strncmp(text, makers[i].prefix, strlen(makers[i].prefix)))
			return makers[i].make(text + strlen(makers[i].prefix));
	return number(text);
}

static struct id *id_of(const char *text)
{
	struct id *id = calloc(1, sizeof(*id));

	snprintf(id->bytes, sizeof(id->bytes), "%s", text);
	return id;
}

/* tokens: SYMBOL ARG... up to NULL or "/"; gives how many it took. */
static int read_request(struct request *request, char **tokens)
{
	int i;

	memset(request, 0, sizeof(*request));
	if (!tokens[0]) {
		problem = "no symbol given";
		return 0;
	}
	request->symbol = tokens[0];
	request->times = 1;
	for (i = 1; tokens[i] && strcmp(tokens[i], "/"); i++) {
		if (!strncmp(tokens[i], "id:", 3))
			request->id = id_of(tokens[i] + 3);
		else if (request->count < ARGS)
			request->args[request->count++] = argument(tokens[i]);
		else
			problem = "too many arguments";
	}
	*(void **)&request->function = find(request->symbol);
	return i;
}

static int call_once(const struct request *request)
{
	const word *a = request->args;

	if (request->id) {
		int (*with_id)(word, int, struct id, int, word);

		*(function_t *)&with_id = request->function;
		return with_id(a[0], a[1], *request->id, a[2], a[3]);
	}
	return request->function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11]);
}

struct outcome {
	pid_t pid, tid;
	long made, failed;
	int result; /* of the last call */
	uint64_t start_ns, end_ns;
};

static struct outcome make_calls(const struct request *request)
{
	struct outcome outcome = {.pid = getpid(), .tid = syscall(SYS_gettid), .start_ns = now()};

	while (outcome.made < request->times) {
		outcome.result = call_once(request);
		outcome.made++;
		outcome.failed += outcome.result != 0;
	}
	outcome.end_ns = now();
	return outcome;
}

static void print_outcome(const struct outcome *o)
{
	printf("{\"pid\": %d, \"tid\": %d, \"made\": %ld, \"failed\": %ld, \"result\": %d, \"start_ns\": %llu, \"end_ns\": %llu}", o->pid,
	       o->tid, o->made, o->failed, o->result, (unsigned long long)o->start_ns, (unsigned long long)o->end_ns);
}

static void print_answer(const struct request *request, const struct outcome *outcomes, int count)
{
	int i;

	printf("{\"symbol\": \"%s\", \"args\": [", request->symbol);
	for (i = 0; i < request->count; i++)
		printf("%s%llu", i ? ", " : "", (unsigned long long)request->args[i]);
	printf("], \"by\": [");
	for (i = 0; i < count; i++) {
		printf("%s", i ? ", " : "");
		print_outcome(&outcomes[i]);
	}
	printf("]}\n");
}

/* tokens: SYMBOL N ARG... */
static bool read_repeated(struct request *request, char **tokens)
{
	char *shifted[TOKENS + 1];
	int i;

	if (!tokens[0] || !tokens[1]) {
		problem = "give a symbol and a number of calls";
		return false;
	}
	shifted[0] = tokens[0];
	for (i = 1; tokens[i + 1]; i++)
		shifted[i] = tokens[i + 1];
	shifted[i] = NULL;
	read_request(request, shifted);
	request->times = number(tokens[1]);
	return !problem;
}

static void do_load(char **tokens)
{
	const char *name = tokens[0] ? tokens[0] : "libcuda.so.1";
	void *library = library_count < LIBRARIES ? dlopen(name, RTLD_NOW | RTLD_GLOBAL) : NULL;

	if (!library) {
		problem = dlerror();
		return;
	}
	libraries[library_count++] = library;
	printf("{\"loaded\": \"%s\", \"pid\": %d}\n", name, getpid());
}

static void do_call(char **tokens)
{
	struct request request;
	struct outcome outcome;

	if (!read_repeated(&request, tokens))
		return;
	outcome = make_calls(&request);
	print_answer(&request, &outcome, 1);
}

struct task {
	const struct request *request;
	pthread_barrier_t *barrier;
	struct outcome outcome;
};

static void *call_thread(void *data)
{
	struct task *task = data;

	pthread_barrier_wait(task->barrier);
	task->outcome = make_calls(task->request);
	return NULL;
}

static void do_threads(char **tokens)
{
	long count = tokens[0] ? number(tokens[0]) : 0, i;
	static struct task tasks[THREADS];
	static struct outcome outcomes[THREADS];
	pthread_t threads[THREADS];
	pthread_barrier_t barrier;
	struct request request;

	if (count < 1 || count > THREADS)
		problem = "a wrong number of threads";
	if (problem || !read_repeated(&request, tokens + 1))
		return;
	pthread_barrier_init(&barrier, NULL, count);
	for (i = 0; i < count; i++) {
		tasks[i] = (struct task){&request, &barrier, {0}};
		pthread_create(&threads[i], NULL, call_thread, &tasks[i]);
	}
	for (i = 0; i < count; i++) {
		pthread_join(threads[i], NULL);
		outcomes[i] = tasks[i].outcome;
	}
	print_answer(&request, outcomes, count);
}

static void do_fork(char **tokens)
{
	long count = tokens[0] ? number(tokens[0]) : 0, i;
	struct outcome outcomes[THREADS];
	struct request request;
	int pipes[2];

	if (count < 1 || count > THREADS || pipe(pipes))
		problem = "a wrong number of children";
	if (problem || !read_repeated(&request, tokens + 1))
		return;
	for (i = 0; i < count; i++) {
		if (fork() == 0) {
			struct outcome outcome = make_calls(&request);

			_exit(write(pipes[1], &outcome, sizeof(outcome)) != sizeof(outcome));
		}
	}
	for (i = 0; i < count; i++)
		if (read(pipes[0], &outcomes[i], sizeof(outcomes[i])) != sizeof(outcomes[i]))
			problem = "a child gave no answer";
	while (wait(NULL) > 0)
		;
	close(pipes[0]);
	close(pipes[1]);
	print_answer(&request, outcomes, count);
}

/* The answer is the child's pid and how it ended: 7 as its exit status where it lived to the end. */
static void do_seccomp(char **tokens)
{
	struct request request;
	int status;
	pid_t child;

	if (!read_repeated(&request, tokens))
		return;
	child = fork();
	if (child == 0) {
		if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
			_exit(1);
		for (; request.times; request.times--)
			call_once(&request);
		syscall(SYS_exit, 7); /* exit_group, which _exit makes, is not allowed */
	}
	waitpid(child, &status, 0);
	printf("{\"pid\": %d, \"status\": %d, \"signal\": %d}\n", child, WIFEXITED(status) ? WEXITSTATUS(status) : -1,
	       WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

enum { FIBERS = 16, STACK_BYTES = 64 << 10 };
static ucontext_t fibers[FIBERS], between;
static const struct request *of_fibers;

static void fiber(int number)
{
	long i;

	for (i = 0; i < of_fibers->times; i++) {
		call_once(of_fibers);
		swapcontext(&fibers[number], &between);
	}
}

static void do_fibers(char **tokens)
{
	long count = tokens[0] ? number(tokens[0]) : 0, i, round;
	struct request request;

	if (count < 1 || count > FIBERS)
		problem = "a wrong number of fibers";
	if (problem || !read_repeated(&request, tokens + 1))
		return;
	of_fibers = &request;
	for (i = 0; i < count; i++) {
		getcontext(&fibers[i]);
		fibers[i].uc_stack.ss_sp = malloc(STACK_BYTES);
		fibers[i].uc_stack.ss_size = STACK_BYTES;
		fibers[i].uc_link = &between;
		makecontext(&fibers[i], (void (*)(void))fiber, 1, (int)i);
	}
	for (round = 0; round < request.times; round++)
		for (i = 0; i < count; i++)
			swapcontext(&between, &fibers[i]);
	printf("{\"pid\": %d, \"made\": %ld}\n", getpid(), count * request.times);
}

/* The child's answer is the answer. */
static void do_exec(char **tokens)
{
	char *argv[TOKENS + 4] = {arguments[0], "call"};
	int i, status;
	pid_t child;

	for (i = 0; tokens[i]; i++)
		argv[i + 2] = tokens[i];
	child = fork();
	if (child == 0) {
		execv("/proc/self/exe", argv);
		_exit(127);
	}
	waitpid(child, &status, 0);
	if (status)
		problem = "the executed child failed";
}

static void (*on_next_call)(void (*)(void *), void *);

static bool find_hook(void)
{
	*(void **)&on_next_call = find("gputail_sim_on_next_call");
	return on_next_call != NULL;
}

struct inner {
	const struct request *request;
	uint64_t compute_ns;
};

static void call_inside(void *data)
{
	const struct inner *inner = data;
	uint64_t end = now() + inner->compute_ns;

	while (now() < end)
		;
	call_once(inner->request);
}

static void do_nest(char **tokens)
{
	struct request outer, request;
	struct inner inner = {.request = &request};
	struct outcome outcome = {.pid = getpid(), .tid = syscall(SYS_gettid)};
	long times;
	int taken;

	if (!tokens[0] || !tokens[1])
		problem = "give a number of calls and of nanoseconds";
	if (problem || !find_hook())
		return;
	times = number(tokens[0]);
	inner.compute_ns = number(tokens[1]);
	taken = read_request(&outer, tokens + 2);
	if (!problem && !tokens[2 + taken])
		problem = "no inner call given";
	if (!problem)
		read_request(&request, tokens + 3 + taken);
	if (problem)
		return;
	outcome.start_ns = now();
	while (outcome.made < times) {
		on_next_call(call_inside, &inner);
		outcome.result = call_once(&outer);
		outcome.made++;
		outcome.failed += outcome.result != 0;
	}
	outcome.end_ns = now();
	print_answer(&outer, &outcome, 1);
}

static jmp_buf escape;

static void jump_out(void *unused)
{
	(void)unused;
	longjmp(escape, 1);
}

static void do_longjmp(char **tokens)
{
	static struct request request;
	static struct outcome outcome; /* static: kept across the jumps */

	if (!read_repeated(&request, tokens) || !find_hook())
		return;
	outcome = (struct outcome){.pid = getpid(), .tid = syscall(SYS_gettid), .start_ns = now()};
	while (outcome.made < request.times) {
		outcome.made++;
		if (setjmp(escape))
			continue;
		on_next_call(jump_out, NULL);
		call_once(&request);
	}
	outcome.end_ns = now();
	print_answer(&request, &outcome, 1);
}

static void end_thread(void *unused)
{
	(void)unused;
	syscall(SYS_exit, 0); /* not pthread_exit, which would unwind: the frame just ends */
}

static void *exit_thread(void *data)
{
	on_next_call(end_thread, NULL);
	call_once(data);
	return NULL;
}

static void do_threadexit(char **tokens)
{
	long count = tokens[0] ? number(tokens[0]) : 0, i;
	struct request request;
	struct outcome outcome = {.pid = getpid()};
	pthread_t thread;

	if (count < 1)
		problem = "a wrong number of threads";
	if (problem || !find_hook())
		return;
	read_request(&request, tokens + 1);
	if (problem)
		return;
	outcome.start_ns = now();
	for (i = 0; i < count; i++) {
		pthread_create(&thread, NULL, exit_thread, &request);
		pthread_join(thread, NULL); /* the kernel clears the thread's id at its end, however it ends */
		outcome.made++;
	}
	outcome.end_ns = now();
	print_answer(&request, &outcome, 1);
}

static pthread_t holder;
static struct task held;
static struct request held_request;
static bool holding;
static int release_pipe[2], entered_pipe[2];

/* Inside the held call: until `release`. */
static void wait_inside(void *unused)
{
	char byte = 0;

	(void)unused;
	held.outcome.tid = syscall(SYS_gettid);
	if (write(entered_pipe[1], &byte, 1) == 1 && read(release_pipe[0], &byte, 1) == 1)
		return;
	problem = "the held call was not released";
}

static void *hold_thread(void *data)
{
	struct task *task = data;

	on_next_call(wait_inside, NULL);
	task->outcome = make_calls(task->request);
	return NULL;
}

static void do_hold(char **tokens)
{
	char byte;

	if (!read_repeated(&held_request, tokens) || !find_hook())
		return;
	if (holding || pipe(release_pipe) || pipe(entered_pipe)) {
		problem = "a call is held already";
		return;
	}
	held_request.symbol = strdup(held_request.symbol); /* the command line that it points into is read over */
	held = (struct task){.request = &held_request};
	holding = !pthread_create(&holder, NULL, hold_thread, &held) && read(entered_pipe[0], &byte, 1) == 1;
	printf("{\"pid\": %d, \"tid\": %d}\n", getpid(), held.outcome.tid);
}

static void do_release(char **tokens)
{
	(void)tokens;
	if (!holding || write(release_pipe[1], "", 1) != 1) {
		problem = problem ? problem : "nothing is held";
		return;
	}
	pthread_join(holder, NULL);
	holding = false;
	print_answer(&held_request, &held.outcome, 1);
}

static void do_new(char **tokens)
{
	if (!tokens[0] || !tokens[1])
		problem = "give a name and a value";
	else
		*variable(tokens[0]) = number(tokens[1]);
	if (!problem)
		printf("{}\n");
}

static void do_get(char **tokens)
{
	if (!tokens[0])
		problem = "give a name";
	else
		printf("{\"value\": %llu}\n", (unsigned long long)*variable(tokens[0]));
}

static const struct {
	const char *verb;
	void (*act)(char **tokens);
} verbs[] = {
	{"load", do_load}, {"call", do_call},		{"threads", do_threads},       {"fork", do_fork}, {"exec", do_exec},	   {"nest", do_nest},
	{"new", do_new},   {"longjmp", do_longjmp}, {"threadexit", do_threadexit}, {"hold", do_hold}, {"release", do_release}, {"get", do_get},
	{"seccomp", do_seccomp}, {"fibers", do_fibers},
};

static void act(char **tokens)
{
	size_t i;

	problem = "unknown command";
	for (i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
		if (strcmp(tokens[0], verbs[i].verb))
			continue;
		problem = NULL;
		verbs[i].act(tokens + 1);
	}
	if (problem)
		printf("{\"error\": \"%s\"}\n", problem);
	fflush(stdout);
}

static void split(char *line, char **tokens)
{
	int count = 0;
	char *token;

	line[strcspn(line, "\n")] = 0;
	while ((token = strsep(&line, " ")) && count < TOKENS)
		if (*token)
			tokens[count++] = token;
	tokens[count] = NULL;
}

int main(int argc, char **argv)
{
	char line[4096], *tokens[TOKENS + 1];

	arguments = argv;
	if (argc > 1) { /* what `exec` starts */
		void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);

		if (!library)
			return 1;
		libraries[library_count++] = library;
		act(argv + 1);
		return problem != NULL;
	}
	printf("{\"ready\": true, \"pid\": %d}\n", getpid());
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		split(line, tokens);
		if (!tokens[0])
			continue;
		if (!strcmp(tokens[0], "quit"))
			break;
		act(tokens);
	}
	return 0;
}
