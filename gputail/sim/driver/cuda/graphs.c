/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Graphs: recorded from streams or built of kernel nodes. A launch is one operation that takes the sum of the nodes' times
 * and the largest of their shares; what the nodes would do side by side is not worked out.
 */
#include "driver.h"

#include <stdlib.h>

#define INSTANTIATE_NS (100 * US)
#define INSTANTIATE_NS_PER_NODE (10 * US)
#define UPDATE_NS (50 * US)

struct CUgraph_st {
	double work_ns, share;
	uintptr_t nodes;
	CUstream streams; /* those recorded, from the first on */
};

struct CUgraphExec_st {
	double work_ns, share;
};

typedef void *CUgraphNode;

typedef struct {
	CUfunction function;
	unsigned int grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
	void **params;
	void **extra;
} CUDA_KERNEL_NODE_PARAMS;

CUresult record_op(CUgraph graph, const struct op *ops, unsigned int count)
{
	unsigned int i;

	for (i = 0; i < count; i++) {
		bool is_copy = ops[i].kind == HTOD || ops[i].kind == DTOH;

		graph->work_ns += is_copy ? ops[i].work / ops[i].rate : ops[i].work;
		graph->share = ops[i].share > graph->share ? ops[i].share : graph->share;
		graph->nodes++;
	}
	return SUCCESS;
}

/* A stream that waits for an event of one being recorded is recorded with it. */
void record_too(CUgraph graph, CUstream stream)
{
	if (stream->capture)
		return;
	stream->capture = graph;
	stream->joined = graph->streams;
	graph->streams = stream;
}

static CUgraph new_graph(void)
{
	return calloc(1, sizeof(struct CUgraph_st));
}

static CUresult begin(CUstream stream, CUgraph graph, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);

	if (result || !graph)
		return result ? result : OUT_OF_MEMORY;
	if (stream == &legacy_stream || stream->capture)
		return STREAM_CAPTURE_UNSUPPORTED;
	record_too(graph, stream);
	return SUCCESS;
}

static CUresult end(CUstream stream, CUgraph *graph, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);
	CUstream next;

	if (result || !stream->capture)
		return result ? result : INVALID_VALUE;
	*graph = stream->capture;
	for (stream = (*graph)->streams; stream; stream = next) {
		next = stream->joined;
		stream->capture = NULL;
		stream->joined = NULL;
	}
	(*graph)->streams = NULL;
	return SUCCESS;
}

API CUresult cuStreamBeginCapture(CUstream stream) { return begin(stream, new_graph(), false); }
API CUresult cuStreamBeginCapture_ptsz(CUstream stream) { return begin(stream, new_graph(), true); }
API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode UNUSED) { return begin(stream, new_graph(), false); }
API CUresult cuStreamBeginCapture_v2_ptsz(CUstream stream, int mode UNUSED) { return begin(stream, new_graph(), true); }

API CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *after UNUSED,
					 const void *edges UNUSED, size_t count UNUSED, int mode UNUSED)
{
	return begin(stream, graph, false);
}

API CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream stream, CUgraph graph, const CUgraphNode *after UNUSED,
					      const void *edges UNUSED, size_t count UNUSED, int mode UNUSED)
{
	return begin(stream, graph, true);
}

API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph) { return end(stream, graph, false); }
API CUresult cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph) { return end(stream, graph, true); }

static CUresult is_capturing(CUstream stream, int *status, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);

	if (!result)
		*status = stream->capture != NULL;
	return result;
}

API CUresult cuStreamIsCapturing(CUstream stream, int *status) { return is_capturing(stream, status, false); }
API CUresult cuStreamIsCapturing_ptsz(CUstream stream, int *status) { return is_capturing(stream, status, true); }

API CUresult cuGraphCreate(CUgraph *graph, unsigned int flags UNUSED)
{
	*graph = new_graph();
	return *graph ? check_context() : OUT_OF_MEMORY;
}

API CUresult cuGraphDestroy(CUgraph graph)
{
	free(graph);
	return check_context();
}

static CUresult add_kernel(CUgraphNode *node, CUgraph graph, const CUDA_KERNEL_NODE_PARAMS *params)
{
	struct op op;
	CUresult result = make_kernel(&op, params->function, params->params,
				      (double)params->grid_x * params->grid_y * params->grid_z * params->block_x *
					      params->block_y * params->block_z);

	if (result)
		return result;
	record_op(graph, &op, 1);
	*node = (CUgraphNode)graph->nodes;
	return check_context();
}

API CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after UNUSED, size_t count UNUSED,
				  const CUDA_KERNEL_NODE_PARAMS *params)
{
	return add_kernel(node, graph, params);
}

API CUresult cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after UNUSED, size_t count UNUSED,
				     const CUDA_KERNEL_NODE_PARAMS *params)
{
	return add_kernel(node, graph, params);
}

static CUresult instantiate(CUgraphExec *exec, CUgraph graph)
{
	CUgraphExec new = malloc(sizeof(*new));

	if (!gpu || !graph || !new)
		return !gpu ? NOT_INITIALIZED : !new ? OUT_OF_MEMORY : INVALID_VALUE;
	*new = (struct CUgraphExec_st){graph->work_ns, graph->share};
	*exec = new;
	burn_until(now_ns() + INSTANTIATE_NS + (int64_t)graph->nodes * INSTANTIATE_NS_PER_NODE);
	return SUCCESS;
}

API CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *node UNUSED, char *log UNUSED, size_t size UNUSED)
{
	return instantiate(exec, graph);
}

API CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *node UNUSED, char *log UNUSED, size_t size UNUSED)
{
	return instantiate(exec, graph);
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags UNUSED)
{
	return instantiate(exec, graph);
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, void *params UNUSED) { return instantiate(exec, graph); }
API CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, void *params UNUSED) { return instantiate(exec, graph); }

static CUresult update(CUgraphExec exec, CUgraph graph)
{
	*exec = (struct CUgraphExec_st){graph->work_ns, graph->share};
	burn_until(now_ns() + UPDATE_NS);
	return check_context();
}

API CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *node UNUSED, int *outcome)
{
	*outcome = 0;
	return update(exec, graph);
}

API CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, int *outcome)
{
	*outcome = 0;
	return update(exec, graph);
}

API CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	free(exec);
	return check_context();
}

API CUresult cuGraphUpload(CUgraphExec exec UNUSED, CUstream stream UNUSED) { return check_context(); }
API CUresult cuGraphUpload_ptsz(CUgraphExec exec UNUSED, CUstream stream UNUSED) { return check_context(); }

static CUresult launch(CUgraphExec exec, CUstream stream, bool per_thread)
{
	CUresult result = find_stream(&stream, per_thread);
	struct op op = {.kind = GRAPH};

	if (result || !exec)
		return result ? result : INVALID_HANDLE;
	op.work = exec->work_ns;
	op.share = exec->share;
	return stream->capture ? record_op(stream->capture, &op, 1) : queue_launch(stream, &op, 1);
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream) { return launch(exec, stream, false); }
API CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream) { return launch(exec, stream, true); }
