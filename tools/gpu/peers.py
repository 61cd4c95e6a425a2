"""What cuBLAS (by torch, BF16) takes for the products of tools/gpu/bench.cu: matrices that together exceed the caches, in one graph."""
import torch

ROUNDS, RING = 9, 1 << 30


def time_graph(fn):
    fn()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    times = []
    for _ in range(ROUNDS + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    times = sorted(times[2:])
    return times[len(times) // 2], times[0]


print(torch.__version__, torch.cuda.get_device_name())
for outs, cols in ((9216, 6144), (3072, 6144)):
    count = RING // (outs * cols * 2) + 1
    weights = [torch.randn(outs, cols, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    for m in (1, 8, 64, 512, 2048):
        x = torch.randn(m, cols, device="cuda", dtype=torch.bfloat16)
        median, best = time_graph(lambda: [torch.nn.functional.linear(x, w) for w in weights])
        us, size = median / count, outs * cols * 2
        print(f"cublas bf16 {cols}->{outs} m{m}: {us:.2f} us (best {best / count:.2f}), {size / us * 1e-3:.0f} GB/s, {2 * m * outs * cols / us * 1e-6:.1f} TFLOP/s")
