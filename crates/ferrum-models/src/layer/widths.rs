//! Widths of the activations that a layer needs.

use crate::spec::{AttentionSpec, DecoderSpec, FeedForwardSpec, LayerForm};

/// Elements per token of each scratch buffer but `gates`, `mla`, `moe` and `lora`, in the order of [`Scratch`]'s fields.
pub(crate) fn scratch_widths(spec: &DecoderSpec) -> [usize; 13] {
    let (mut q_dim, mut qkv_dim, mut out_dim) = (0, 0, 0);
    let (mut gate_up, mut intermediate) = (0, 0);
    let (mut heads, mut zeros) = ([0; 3], 0);
    let hidden = spec.hidden_size;
    for layer in &spec.layers {
        if layer.form == LayerForm::PostNorm {
            zeros = hidden;
        }
        match &layer.feed_forward {
            FeedForwardSpec::GatedMlp(mlp) => {
                gate_up = gate_up.max(2 * mlp.intermediate);
                intermediate = intermediate.max(mlp.intermediate);
            }
            FeedForwardSpec::Mlp(mlp) => {
                gate_up = gate_up.max(mlp.intermediate);
                intermediate = intermediate.max(mlp.intermediate);
            }
            FeedForwardSpec::Moe(moe) => {
                let shared = moe.shared_intermediate();
                gate_up = gate_up.max(2 * shared);
                intermediate = intermediate.max(shared);
            }
        }
        let (shape, out) = match &layer.attention {
            AttentionSpec::Gqa(gqa) => (gqa.qkv_shape(0), gqa.heads * gqa.value_dim),
            AttentionSpec::Mla(mla) => {
                q_dim = q_dim.max(mla.heads * mla.latent_dim());
                out_dim = out_dim.max(mla.heads * mla.rank);
                // Values are there when queries are not needed any more.
                qkv_dim = qkv_dim.max(mla.heads * mla.query_dim().max(mla.value_dim));
                continue;
            }
            AttentionSpec::ShortConv(conv) => (conv.parts(0), conv.channels),
            AttentionSpec::Linear(linear) => {
                q_dim = q_dim.max(linear.row_dim());
                out_dim = out_dim.max(linear.values());
                qkv_dim = qkv_dim.max(linear.projected());
                continue;
            }
        };
        if let AttentionSpec::Gqa(gqa) = &layer.attention
            && gqa.gate
        {
            // What the gate leaves of attention's output.
            q_dim = q_dim.max(out);
        }
        if let AttentionSpec::Gqa(gqa) = &layer.attention
            && gqa.parts_heads()
        {
            let widths = [shape.q_dim(), shape.k_dim(), shape.v_dim()];
            heads = std::array::from_fn(|i| heads[i].max(widths[i]));
        }
        q_dim = q_dim.max(shape.q_dim());
        out_dim = out_dim.max(out);
        qkv_dim = qkv_dim.max(shape.row_dim());
    }
    let [queries, keys, values] = heads;
    let positions = spec.learned_positions.map_or(0, |_| hidden);
    if spec.per_layer.is_some() {
        zeros = hidden;
    }
    [
        hidden,
        hidden,
        hidden,
        qkv_dim,
        q_dim,
        out_dim,
        gate_up,
        intermediate,
        queries,
        keys,
        values,
        zeros,
        positions,
    ]
}
