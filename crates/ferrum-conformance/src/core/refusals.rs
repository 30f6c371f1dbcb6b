//! Sizes and settings that cannot be: every backend says so before it touches memory.
//!
//! These are what a host can know without looking into a buffer: sizes that contradict each other,
//! and sizes whose product no machine can hold, which must not overflow into small ones.

use crate::case::{Cases, act_name, both};
use crate::io::{Check, Fault, Io, Refusals};
use ferrum_kernels::{
    Act, Activation, AttnConfig, Backend, CacheSpan, Conv1dShape, FlashShape, GeluKind, GemmShape,
    HeadLayout, HeadsShape, Logits, MatShape, MlaShape, NormShape, PatchShape, QkvShape,
    QkvTransform, Residual, Rope, RopeStyle, RowShape,
};
use ferrum_types::SrcDtype;

/// More elements than there can be, also after it is multiplied by an element's size.
const MANY: usize = usize::MAX / 2 + 1;

/// A context and three buffers with room for any small shape.
struct Bench<'d, B: Backend> {
    io: Io<'d, B>,
    a: Act<B>,
    b: Act<B>,
    out: Act<B>,
    residual: Residual<B>,
    logits: Logits<B>,
    floats: B::Buffer<f32>,
    ints: B::Buffer<i32>,
}

impl<'d, B: Backend> Bench<'d, B> {
    fn new(device: &'d B) -> Check<Self> {
        let io = Io::new(device, Fault::None)?;
        Ok(Bench {
            a: device.alloc(1000)?,
            b: device.alloc(1000)?,
            out: device.alloc(1000)?,
            residual: device.alloc(1000)?,
            logits: device.alloc(1000)?,
            floats: device.alloc(1000)?,
            ints: device.alloc(1000)?,
            io,
        })
    }
}

fn gemm<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let weight =
        device.from_weight_bytes(&[0; 60], SrcDtype::F32, MatShape { rows: 3, cols: 5 })?;
    let (ctx, out) = (&mut bench.io.ctx, &mut bench.out);
    for (rows, n, k) in [
        (2, 4, 5),
        (2, 3, 4),
        (2, 5, 3),
        (2, 2, 5),
        (MANY, 3, 5),
        (usize::MAX, 3, 5),
    ] {
        let shape = GemmShape { rows, n, k };
        refused.expect(
            &format!("{shape:?} of a [3, 5]"),
            B::gemm(ctx, &bench.a, &weight, out, shape),
        )?;
    }
    for (rows, dim) in [(2, 4), (2, 6), (MANY, 5), (usize::MAX, 5)] {
        let shape = RowShape { rows, dim };
        let result = B::embedding_lookup(ctx, &weight, &bench.ints, &mut bench.residual, shape);
        refused.expect(&format!("a look-up of {shape:?} in a [3, 5]"), result)?;
    }
    Ok(())
}

/// Rows whose number or length no buffer can have.
const ROWS: [RowShape; 4] = [
    RowShape { rows: MANY, dim: 2 },
    RowShape { rows: 2, dim: MANY },
    RowShape {
        rows: 1 << 33,
        dim: 1 << 33,
    },
    RowShape {
        rows: usize::MAX,
        dim: 1,
    },
];

fn rows<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let Bench {
        io,
        a,
        b,
        out,
        residual,
        logits,
        floats,
        ints,
    } = &mut bench;
    let ctx = &mut io.ctx;
    for shape in ROWS {
        let RowShape { rows, dim } = shape;
        let norm = NormShape {
            rows,
            dim,
            eps: 1e-6,
        };
        let case = |op: &str| format!("{op} of {shape:?}");
        refused.expect(
            &case("gather_rows"),
            B::gather_rows(ctx, a, ints, out, shape),
        )?;
        refused.expect(
            &case("argmax_rows"),
            B::argmax_rows(ctx, logits, ints, shape),
        )?;
        refused.expect(&case("rms_norm"), B::rms_norm(ctx, a, floats, out, norm))?;
        refused.expect(
            &case("fused_add_rms_norm"),
            B::fused_add_rms_norm(ctx, residual, a, floats, out, norm),
        )?;
        refused.expect(
            &case("layer_norm"),
            B::layer_norm(ctx, a, floats, None, out, norm),
        )?;
        refused.expect(
            &case("fused_silu_mul_split"),
            B::fused_silu_mul_split(ctx, a, out, shape),
        )?;
        let gelu = B::fused_gelu_mul_split(ctx, a, out, GeluKind::Tanh, shape);
        refused.expect(&case("fused_gelu_mul_split"), gelu)?;
        refused.expect(&case("add_bias"), B::add_bias(ctx, out, floats, shape))?;
    }
    for len in [1001, MANY, usize::MAX] {
        let case = |op: &str| format!("{op} of {len} elements");
        let result = B::activate(ctx, Activation::Tanh, a, Some(b), out, len);
        refused.expect(&case("activate"), result)?;
        refused.expect(&case("gelu"), B::gelu(ctx, a, out, len))?;
        refused.expect(&case("gelu_tanh"), B::gelu_tanh(ctx, a, out, len))?;
        refused.expect(&case("silu"), B::silu(ctx, a, out, len))?;
        refused.expect(&case("add_inplace"), B::add_inplace(ctx, out, a, len))?;
        refused.expect(
            &case("scaled_add_inplace"),
            B::scaled_add_inplace(ctx, out, a, 2.0, len),
        )?;
        refused.expect(&case("scale_inplace"), B::scale_inplace(ctx, out, 2.0, len))?;
        refused.expect(&case("mul"), B::mul(ctx, a, b, out, len))?;
        refused.expect(&case("softcap"), B::softcap(ctx, out, 2.0, len))?;
    }
    Ok(())
}

/// Heads whose number or size no buffer can have.
const HEADS: [HeadsShape; 4] = [
    HeadsShape {
        tokens: MANY,
        heads: 2,
        head_dim: 2,
    },
    HeadsShape {
        tokens: 2,
        heads: MANY,
        head_dim: 2,
    },
    HeadsShape {
        tokens: 2,
        heads: 2,
        head_dim: MANY,
    },
    HeadsShape {
        tokens: 1 << 22,
        heads: 1 << 22,
        head_dim: 1 << 22,
    },
];

fn heads<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let mut v: Act<B> = device.alloc(1000)?;
    let Bench { io, a, b, out, .. } = &mut bench;
    let ctx = &mut io.ctx;
    let plain = QkvTransform {
        q_norm: None,
        k_norm: None,
        rope: None,
    };
    for shape in HEADS {
        let case = |op: &str| format!("{op} of {shape:?}");
        let HeadsShape {
            tokens,
            heads,
            head_dim,
        } = shape;
        let qkv = QkvShape {
            tokens,
            heads,
            kv_heads: heads,
            head_dim,
            value_dim: head_dim,
        };
        let span = CacheSpan {
            capacity: tokens,
            offset: 0,
        };
        refused.expect(
            &case("split_qkv"),
            B::split_qkv(ctx, a, b, out, &mut v, qkv),
        )?;
        let result = B::split_qkv_norm_rope(ctx, a, b, out, &mut v, plain, qkv);
        refused.expect(&case("split_qkv_norm_rope"), result)?;
        let result = B::qk_norm_rope(ctx, out, HeadLayout::HeadMajor, None, None, shape);
        refused.expect(&case("qk_norm_rope"), result)?;
        let result = B::kv_cache_append_head_major(ctx, a, b, (out, &mut v), span, shape);
        refused.expect(&case("kv_cache_append_head_major"), result)?;
        let result = B::transpose_head_to_token(ctx, a, out, shape);
        refused.expect(&case("transpose_head_to_token"), result)?;
        let result = B::transpose_token_to_head(ctx, a, out, shape);
        refused.expect(&case("transpose_token_to_head"), result)?;
    }
    Ok(())
}

fn rotation<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let Bench {
        io,
        out,
        floats,
        ints,
        ..
    } = &mut bench;
    let shape = HeadsShape {
        tokens: 2,
        heads: 2,
        head_dim: 8,
    };
    for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
        for rot_dim in [3, 9, 10, MANY, usize::MAX] {
            let rope = Rope {
                cos: &*floats,
                sin: &*floats,
                rows: &*ints,
                rot_dim,
                style,
            };
            let layout = HeadLayout::TokenMajor;
            let result = B::qk_norm_rope(&mut io.ctx, out, layout, None, Some(rope), shape);
            refused.expect(&format!("rot_dim {rot_dim} of heads of 8"), result)?;
        }
    }
    Ok(())
}

fn spans<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let mut cache: Act<B> = device.alloc(1000)?;
    let Bench { io, a, b, out, .. } = &mut bench;
    let ctx = &mut io.ctx;
    let plain = QkvTransform {
        q_norm: None,
        k_norm: None,
        rope: None,
    };
    let qkv = QkvShape {
        tokens: 3,
        heads: 2,
        kv_heads: 2,
        head_dim: 4,
        value_dim: 4,
    };
    for (capacity, offset) in [
        (10, 8),
        (10, 10),
        (2, 0),
        (10, usize::MAX),
        (MANY, 0),
        (usize::MAX, 1),
    ] {
        let span = CacheSpan { capacity, offset };
        let case = format!("three tokens in {span:?}");
        let result = B::kv_cache_append_head_major(ctx, a, b, (out, &mut cache), span, qkv.k());
        refused.expect(&case, result)?;
        let mut q: Act<B> = device.alloc(100)?;
        let caches = (&mut *out, &mut cache);
        let result = B::split_qkv_norm_rope_into_cache(ctx, a, &mut q, caches, span, plain, qkv);
        refused.expect(&case, result)?;
    }
    Ok(())
}

const CONFIG: AttnConfig = AttnConfig {
    heads: 4,
    kv_heads: 2,
    head_dim: 8,
    value_dim: 8,
    scale: 0.3,
    causal: true,
    sliding_window: None,
    chunked: false,
    softcap: None,
};

const FLASH: FlashShape = FlashShape {
    q_len: 3,
    kv_len: 5,
    kv_seq_stride: 6,
    pos_offset: 2,
};

fn flash<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let Bench { io, a, b, out, .. } = &mut bench;
    let ctx = &mut io.ctx;
    for config in [
        AttnConfig { heads: 3, ..CONFIG },
        AttnConfig {
            kv_heads: 0,
            ..CONFIG
        },
        AttnConfig {
            kv_heads: 3,
            ..CONFIG
        },
        AttnConfig {
            heads: MANY,
            ..CONFIG
        },
        AttnConfig {
            head_dim: MANY,
            ..CONFIG
        },
        AttnConfig {
            value_dim: MANY,
            ..CONFIG
        },
    ] {
        let result = B::flash_attention(ctx, a, (b, b), None, out, FLASH, &config);
        refused.expect(&format!("{config:?}"), result)?;
    }
    for shape in [
        FlashShape { kv_len: 7, ..FLASH },
        FlashShape {
            q_len: MANY,
            ..FLASH
        },
        FlashShape {
            kv_seq_stride: MANY,
            ..FLASH
        },
        FlashShape {
            kv_len: MANY,
            kv_seq_stride: MANY,
            ..FLASH
        },
    ] {
        let result = B::flash_attention(ctx, a, (b, b), None, out, shape, &CONFIG);
        refused.expect(&format!("{shape:?}"), result)?;
    }
    Ok(())
}

fn mla<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let Bench { io, a, b, out, .. } = &mut bench;
    let shape = MlaShape {
        q_len: 3,
        kv_len: 5,
        heads: 2,
        rank: 8,
        rope_dim: 4,
        pos_offset: 2,
        scale: 0.3,
        causal: true,
    };
    for shape in [
        MlaShape {
            q_len: MANY,
            ..shape
        },
        MlaShape {
            kv_len: MANY,
            ..shape
        },
        MlaShape {
            heads: MANY,
            ..shape
        },
        MlaShape {
            rank: MANY,
            ..shape
        },
        MlaShape {
            rank: MANY,
            rope_dim: MANY,
            ..shape
        },
        MlaShape {
            rope_dim: usize::MAX,
            ..shape
        },
    ] {
        refused.expect(
            &format!("{shape:?}"),
            B::mla_attention(&mut io.ctx, a, b, out, shape),
        )?;
    }
    Ok(())
}

fn conv1d<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let Bench {
        io, a, out, floats, ..
    } = &mut bench;
    let shape = Conv1dShape {
        c_in: 4,
        c_out: 6,
        len: 9,
        kernel: 3,
        stride: 1,
        padding: 1,
        groups: 2,
    };
    for shape in [
        Conv1dShape { groups: 0, ..shape },
        Conv1dShape { groups: 3, ..shape },
        Conv1dShape { groups: 4, ..shape },
        Conv1dShape { stride: 0, ..shape },
        Conv1dShape { kernel: 0, ..shape },
        Conv1dShape {
            kernel: MANY,
            padding: MANY / 2,
            ..shape
        },
        Conv1dShape {
            padding: usize::MAX,
            ..shape
        },
        Conv1dShape { len: MANY, ..shape },
        Conv1dShape {
            c_in: MANY,
            ..shape
        },
        Conv1dShape {
            c_out: MANY,
            ..shape
        },
    ] {
        let result = B::conv1d(&mut io.ctx, a, floats, None, out, shape);
        refused.expect(&format!("{shape:?}"), result)?;
    }
    Ok(())
}

fn conv2d<B: Backend>(device: &B, refused: &mut Refusals) -> Check {
    let mut bench = Bench::new(device)?;
    let Bench {
        io, a, out, floats, ..
    } = &mut bench;
    let shape = PatchShape {
        channels: 3,
        height: 8,
        width: 8,
        patch: 4,
        out: 5,
    };
    for shape in [
        PatchShape { patch: 0, ..shape },
        PatchShape { patch: 3, ..shape },
        PatchShape { height: 9, ..shape },
        PatchShape { width: 6, ..shape },
        PatchShape {
            channels: MANY,
            ..shape
        },
        PatchShape {
            height: MANY,
            ..shape
        },
        PatchShape { out: MANY, ..shape },
    ] {
        let result = B::conv2d_patch(&mut io.ctx, a, floats, None, out, shape);
        refused.expect(&format!("{shape:?}"), result)?;
    }
    Ok(())
}

pub(super) fn cases<B: Backend>(cases: &mut Cases<B>) {
    let act = act_name::<B>();
    let mut add = |op, name, runs| cases.refuses((op, act, name), runs);
    add("gemm", "sizes that cannot be", both!(gemm));
    add(
        "rms_norm",
        "sizes of rows that cannot be, in every op",
        both!(rows),
    );
    add(
        "split_qkv",
        "sizes of heads that cannot be, in every op",
        both!(heads),
    );
    add("qk_norm_rope", "rotations that cannot be", both!(rotation));
    add(
        "kv_cache_append_head_major",
        "spans that cannot be",
        both!(spans),
    );
    add("flash_attention", "sizes that cannot be", both!(flash));
    add("mla_attention", "sizes that cannot be", both!(mla));
    add("conv1d", "sizes that cannot be", both!(conv1d));
    add("conv2d_patch", "sizes that cannot be", both!(conv2d));
}
