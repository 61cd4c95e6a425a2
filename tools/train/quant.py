"""The number formats: exact on the grid, straight-through for training. Works on old torch too (no float8 there)."""
import torch

HAVE_F8 = hasattr(torch, "float8_e4m3fn")


def e4m3(x):
    """Round to E4M3 FN, to nearest even, saturating at 448; float32 in and out."""
    x = x.clamp(-448.0, 448.0)
    if HAVE_F8 and x.is_cuda:
        return x.to(torch.float8_e4m3fn).float()
    a = x.abs()
    _, e = torch.frexp(torch.where(a > 0, a, torch.ones_like(a)))
    step = torch.exp2((e.float() - 1).clamp(min=-6) - 3)
    return torch.round(x / step) * step


def e2m1(a):
    """Round a >= 0 to 0, .5, 1, 1.5, 2, 3, 4, 6 (ties to the even code)."""
    lo = torch.round(a * 2) * 0.5
    mid = torch.round(a)
    hi = torch.round(a * 0.5) * 2
    return torch.where(a < 2, lo, torch.where(a < 4, mid, hi)).clamp(max=6.0)


def ste(x, q):
    return x + (q - x).detach()


def nvfp4_cache(x):
    """K, V and index K: groups of 16, E4M3 scale of amax/6, no global scale, second E4M3 rounding on read."""
    f = x.detach().float()
    g = f.reshape(*f.shape[:-1], f.shape[-1] // 16, 16)
    s = e4m3((g.abs().amax(-1, keepdim=True) / 6).clamp(1 / 512, 448))
    q = e4m3(torch.sign(g) * e2m1(g.abs() / s) * s)
    return ste(x, q.reshape(f.shape).to(x.dtype))


def q_e4m3(x):
    return ste(x, e4m3(x.detach().float()).to(x.dtype))


def nvfp4_weight(w, dims):
    """Two-level NVFP4 along the last dimension. The global scale, one for each index outside `dims`, is a power of
    two, so that every dequantised weight is exact in BF16. Gives (dequantised, scales, codes, global scale)."""
    amax = w.abs().amax(dims, keepdim=True).clamp(min=1e-12)
    g = torch.exp2(torch.floor(torch.log2(2688.0 / amax)))
    b = w.reshape(*w.shape[:-1], w.shape[-1] // 16, 16)
    gb = g.unsqueeze(-1)
    s = e4m3((b.abs().amax(-1, keepdim=True) / 6 * gb).clamp(min=1 / 512))
    code = e2m1(b.abs() * gb / s) * torch.sign(b)
    return (code * s / gb).reshape(w.shape), s.squeeze(-1), code.reshape(w.shape), g


def mxfp8_weight(w):
    """E4M3 with one power-of-two scale per 32 inputs, chosen so that nothing saturates. (dequantised, exponent, value)"""
    b = w.reshape(*w.shape[:-1], w.shape[-1] // 32, 32)
    amax = b.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    e = torch.ceil(torch.log2(amax / 448.0)).clamp(-126, 127)
    v = e4m3(b * torch.exp2(-e))
    return (v * torch.exp2(e)).reshape(w.shape), e.squeeze(-1), v.reshape(w.shape)
