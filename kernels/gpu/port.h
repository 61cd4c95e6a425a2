/* gpu/port: the little of a GPU's language that the kernels use, so that another compiler needs
 * this file alone. Lanes work in groups of 32 ("warps").
 *
 * The one matrix instruction is the 16 x 8 product of CUDA's PTX (m16n8k16 on halves, m16n8k8 on
 * tf32): lane = 4 g + t holds of A [16, k] the rows g and g + 8, of B [k, 8] the column g, of the
 * result rows g and g + 8 at columns 2 t and 2 t + 1 (PTX ISA, "Matrix fragments for
 * mma.m16n8k16").
 */
#pragma once
#include <stdint.h>

#if defined(__CUDACC__)

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#define GPU_FN static __device__ __forceinline__
#define GPU_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
/* So many blocks of so many threads at once on a processor: bounds the registers. */
#define GPU_DENSE_KERNEL(threads, blocks)                                                          \
    extern "C" __global__ void __launch_bounds__(threads, blocks)
#define GPU_SHARED __shared__
#define GPU_EVERYONE 0xffffffffu

GPU_FN uint32_t thread_x(void)
{
    return threadIdx.x;
}

GPU_FN uint32_t block_x(void)
{
    return blockIdx.x;
}

GPU_FN uint32_t block_y(void)
{
    return blockIdx.y;
}

GPU_FN uint32_t block_z(void)
{
    return blockIdx.z;
}

GPU_FN uint32_t blocks_x(void)
{
    return gridDim.x;
}

GPU_FN uint32_t threads_x(void)
{
    return blockDim.x;
}

/* What the launch asked for, at a multiple of 16. */
GPU_FN uint8_t *dynamic_shared(void)
{
    extern __shared__ uint4 gpu_dynamic[];
    return (uint8_t *)gpu_dynamic;
}

GPU_FN void sync_block(void)
{
    __syncthreads();
}

GPU_FN void sync_warp(void)
{
    __syncwarp();
}

GPU_FN uint32_t shfl(uint32_t v, uint32_t from)
{
    return __shfl_sync(GPU_EVERYONE, v, (int)from);
}

GPU_FN float shfl_xor(float v, uint32_t mask)
{
    return __shfl_xor_sync(GPU_EVERYONE, v, (int)mask);
}

GPU_FN uint32_t shfl_xor_u(uint32_t v, uint32_t mask)
{
    return __shfl_xor_sync(GPU_EVERYONE, v, (int)mask);
}

/* Bit i: lane i's v is not 0. */
GPU_FN uint32_t ballot(uint32_t v)
{
    return __ballot_sync(GPU_EVERYONE, v);
}

GPU_FN uint32_t warp_sum_u(uint32_t v)
{
    return __reduce_add_sync(GPU_EVERYONE, v);
}

GPU_FN uint32_t shfl_up_u(uint32_t v, uint32_t by)
{
    return __shfl_up_sync(GPU_EVERYONE, v, by);
}

GPU_FN uint32_t lowest_bit(uint32_t v)
{
    return (uint32_t)__ffs((int)v) - 1;
}

GPU_FN uint32_t add_shared(uint32_t *at, uint32_t v)
{
    return atomicAdd(at, v);
}

GPU_FN float fma_rn(float a, float b, float c)
{
    return __fmaf_rn(a, b, c);
}

GPU_FN float mul_rn(float a, float b)
{
    return __fmul_rn(a, b);
}

GPU_FN float add_rn(float a, float b)
{
    return __fadd_rn(a, b);
}

GPU_FN float div_rn(float a, float b)
{
    return __fdiv_rn(a, b);
}

GPU_FN float sqrt_rn(float a)
{
    return __fsqrt_rn(a);
}

GPU_FN uint32_t bits_of(float x)
{
    return __float_as_uint(x);
}

GPU_FN float float_of(uint32_t x)
{
    return __uint_as_float(x);
}

/* ---- two halves in a word ---- */

GPU_FN uint32_t h2_of(float low, float high)
{
    const __half2 h = __floats2half2_rn(low, high);
    return *(const uint32_t *)&h;
}

GPU_FN float h_low(uint32_t h)
{
    return __low2float(*(const __half2 *)&h);
}

GPU_FN float h_high(uint32_t h)
{
    return __high2float(*(const __half2 *)&h);
}

GPU_FN uint32_t h2_mul(uint32_t a, uint32_t b)
{
    const __half2 h = __hmul2(*(const __half2 *)&a, *(const __half2 *)&b);
    return *(const uint32_t *)&h;
}

/* Two e4m3 bytes, exact. */
GPU_FN uint32_t h2_of_e4m3(uint32_t pair)
{
    uint32_t h;
    asm("{ .reg .b16 p; cvt.u16.u32 p, %1; cvt.rn.f16x2.e4m3x2 %0, p; }" : "=r"(h) : "r"(pair));
    return h;
}

/* Rounded to nearest even, saturating at 448; a NaN gives 0x7f. */
GPU_FN uint32_t e4m3_of_h2(uint32_t h)
{
    uint16_t p;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(p) : "r"(h));
    return p;
}

/* Bytes of {a, b} (a the low four) by selector. */
GPU_FN uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector)
{
    return __byte_perm(a, b, selector);
}

/* ---- memory ---- */

/* Weights: read once, so they should not push anything out of the first cache. */
GPU_FN uint4 load_once(const void *at)
{
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(at));
    return v;
}

/* 16 bytes from device memory to shared memory, in the background until copy_wait. */
GPU_FN void copy_async16(void *shared, const void *global)
{
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

GPU_FN void copy_async4(void *shared, const void *global)
{
    const uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(global) : "memory");
}

GPU_FN void copy_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most `left` groups are under way. */
#define copy_wait(left) asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory")

/* The next kernel of the stream may start its preamble; and: what the kernels before wrote is
 * there. */
GPU_FN void launch_dependents(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

GPU_FN void wait_for_previous(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* c += A B, halves. */
GPU_FN void mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c += A B, floats of which the upper 19 bits count. */
GPU_FN void mma_tf32(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#else
#error "nvcc only, so far"
#endif

GPU_FN uint32_t lane_of(void)
{
    return thread_x() & 31;
}

GPU_FN uint32_t warp_of(void)
{
    return thread_x() >> 5;
}
