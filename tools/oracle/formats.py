"""The number formats, written for reading: E2M1, E4M3, E8M0, BF16, NVFP4 groups of 16, MXFP8 groups of 32.

Everything is elementwise numpy on float32 values; every intermediate below is exact in float32 or float64, so there is
one result and no tolerance. E4M3 and E8M0: OCP 8-bit Floating Point and Microscaling Formats specifications."""
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3_table():
    v = np.zeros(256, np.float32)
    for b in range(256):
        sign, e, m = -1.0 if b & 0x80 else 1.0, b >> 3 & 15, b & 7
        v[b] = sign * (m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
    v[[0x7F, 0xFF]] = np.nan
    return v


E4M3 = _e4m3_table()  # value of each byte
E8M0 = np.append(np.ldexp(np.float64(1), np.arange(255) - 127), np.nan).astype(np.float32)


def bf16_bits(x):
    """float32 to BF16, round to nearest even. NaN becomes 0x7fc0 with its sign."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    r = ((u + np.uint32(0x7FFF) + (u >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    nan = (u & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (u >> np.uint32(16) & np.uint32(0x8000) | np.uint32(0x7FC0)).astype(np.uint16), r)


def bf16_value(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(x):
    return bf16_value(bf16_bits(x))


def round_e4m3(x):
    """float32 to the nearest E4M3 value, ties to even, saturating at 448 (infinity too); NaN stays."""
    x = np.asarray(x, np.float32)
    a = np.minimum(np.abs(x), np.float32(448)).astype(np.float64)
    _, e = np.frexp(a)                      # a = f * 2^e with f in [0.5, 1)
    step = np.ldexp(1.0, np.maximum(e - 1, -6) - 3)
    return np.copysign(np.rint(a / step) * step, x).astype(np.float32)


def e4m3_bytes(x):
    """The byte of the nearest E4M3 value; NaN is 0x7f."""
    v = round_e4m3(x)
    a = np.abs(v).astype(np.float64)
    _, e = np.frexp(a)
    e = np.maximum(e - 1, -6)
    m = np.nan_to_num(np.ldexp(a, 3 - e)).astype(np.int64)   # 0..15: below 8 only for subnormals
    body = np.where(m < 8, m, (e + 7) * 8 + m - 8)
    return np.where(np.isnan(v), 0x7F, np.where(np.signbit(v), body | 0x80, body)).astype(np.uint8)


def e2m1_codes(x, scale):
    """Codes of x / scale, round to nearest even, saturating, -0 never written.

    |x| is compared with threshold * scale (exact in float64), so no division rounds a tie away."""
    a, s = np.abs(x).astype(np.float64), np.asarray(scale, np.float64)
    code = np.zeros(a.shape, np.uint8)
    for threshold, tie_up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True),
                              (5.0, False)):
        code += (a >= threshold * s) if tie_up else (a > threshold * s)
    return np.where((np.asarray(x) < 0) & (code > 0), code | 8, code).astype(np.uint8)


def pack_nibbles(codes):
    """Element 2i in the low nibble of byte i."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)


def unpack_nibbles(packed):
    return np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[:-1] + (-1,))


def nvfp4_insert(x):
    """BF16-valued float32 [..., d] to (packed [..., d/2], E4M3 scale bytes [..., d/16]); there is no global scale.

    amax / 6 is a float32 division; the codes use the stored scale."""
    g = np.asarray(x, np.float32).reshape(x.shape[:-1] + (-1, 16))
    raw = np.clip(np.abs(g).max(-1) / np.float32(6), np.float32(1 / 512), np.float32(448))
    scales = e4m3_bytes(raw)
    codes = e2m1_codes(g, E4M3[scales][..., None])
    return pack_nibbles(codes.reshape(x.shape)), scales


def readback_table():
    """[256, 16] bytes: scale byte x code to the E4M3 byte that a dot product sees. A NaN scale gives 0x7f."""
    return e4m3_bytes(E4M3[:, None] * E2M1[None, :])


def nvfp4_readback(packed, scales):
    """What is read from the cache: e4m3(e2m1 * scale), rounded a second time and saturating."""
    codes = unpack_nibbles(packed)
    s = np.repeat(E4M3[scales], 16, -1)
    return round_e4m3(E2M1[codes] * s)


def nvfp4_weight(packed, scales, global_scale):
    """e2m1 * e4m3 / global in float32: the product is exact, the division rounds once."""
    return E2M1[unpack_nibbles(packed)] * np.repeat(E4M3[scales], 16, -1) / np.float32(global_scale)


def nvfp4_weight_encode(w, global_scale):
    """The inverse, for writers: (packed, E4M3 scale bytes)."""
    scaled = np.asarray(w, np.float32) * np.float32(global_scale)
    g = scaled.reshape(w.shape[:-1] + (-1, 16))
    scales = e4m3_bytes(np.abs(g).max(-1) / np.float32(6))
    scales = np.maximum(scales, np.uint8(1))
    return pack_nibbles(e2m1_codes(g, E4M3[scales][..., None]).reshape(w.shape)), scales


def mxfp8_weight(elements, scales):
    """e4m3(byte) * 2^(scale - 127), one scale for 32 inputs; the scale multiplies."""
    return E4M3[elements] * np.repeat(E8M0[scales], 32, -1)


def mxfp8_encode(w):
    """The inverse, for writers: the smallest power of two with which nothing saturates."""
    g = np.asarray(w, np.float32).reshape(w.shape[:-1] + (-1, 32))
    f, e = np.frexp(np.maximum(np.abs(g).max(-1).astype(np.float64) / 448, 2.0 ** -100))
    e = np.where(f == 0.5, e - 1, e)
    elements = e4m3_bytes((g / np.ldexp(1.0, e)[..., None]).astype(np.float32)).reshape(w.shape)
    return elements, (e + 127).astype(np.uint8)


def value(tensor):
    """float32 values of a stored tensor (see tensors.Tensor)."""
    if tensor.dtype == "BF16":
        return bf16_value(tensor.data)
    if tensor.dtype == "F8_E4M3":
        return E4M3[tensor.data]
    return tensor.data.astype(np.float32)
