//! Every shader in every form, through the translator, without a device.

use crate::gpu::pipeline::{Kernel, MAX_BINDINGS};
use crate::gpu::{attention, context, conv, elementwise, gemm, heads, kv, norm, sample};
use crate::{Activation, GeluKind};
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// All kernels with the constants that they are used with.
fn all() -> Vec<(&'static Kernel, Vec<u32>)> {
    let plain = [
        &context::COPY_BYTES,
        &gemm::GATHER_ROWS,
        &gemm::ARGMAX,
        &norm::RMS_NORM,
        &norm::ADD_RMS_NORM,
        &norm::LAYER_NORM,
        &elementwise::SOFTCAP,
        &elementwise::SCALE,
        &elementwise::SCALED_ADD,
        &elementwise::ADD_BIAS,
        &heads::COPY_HEADS,
        &heads::QK_NORM_ROPE,
        &heads::SPLIT_QK_NORM_ROPE,
        &attention::CONTIGUOUS,
        &kv::COPY_BLOCK,
        &conv::CONV1D,
        &conv::CAUSAL_CONV1D,
        &conv::CAUSAL_CONV1D_STATE,
        &conv::LINEAR_ATTENTION,
        &conv::CONV2D_PATCH,
        &sample::SAMPLE,
    ];
    let mut all: Vec<_> = plain.into_iter().map(|k| (k, vec![])).collect();
    all.extend(gemm::EMBEDDING.iter().map(|k| (k, vec![])));
    for tile in gemm::ROW_TILES {
        all.extend(gemm::GEMM.iter().map(|k| (k, vec![tile])));
    }
    for activation in [
        Activation::Identity,
        Activation::Gelu(GeluKind::Exact),
        Activation::Gelu(GeluKind::Tanh),
        Activation::Silu,
        Activation::Tanh,
        Activation::Sigmoid,
    ] {
        let constants = vec![elementwise::number(activation)];
        all.push((&elementwise::UNARY, constants.clone()));
        all.push((&elementwise::UNARY_MUL, constants.clone()));
        all.push((&elementwise::GATED, constants));
    }
    all.extend(kv::APPEND.iter().map(|k| (k, vec![kv::APPEND_BATCH])));
    all.extend(kv::ATTENTION.iter().map(|k| (k, vec![kv::ATTENTION_BATCH])));
    all
}

#[test]
fn every_shader_translates_to_metal() {
    let mut failures = Vec::new();
    for (kernel, constants) in all() {
        if let Err(e) = translate(kernel, &constants) {
            failures.push(format!("{} {constants:?}: {e}", kernel.name));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn translate(kernel: &Kernel, constants: &[u32]) -> Result<(), String> {
    let source = kernel.source(constants);
    let module = naga::front::wgsl::parse_str(&source).map_err(|e| e.emit_to_string(&source))?;
    let mut validator = Validator::new(
        ValidationFlags::all(),
        Capabilities::SHADER_FLOAT16_IN_FLOAT32,
    );
    let info = validator
        .validate(&module)
        .map_err(|e| e.emit_to_string(&source))?;

    let bindings = module.global_variables.iter().filter(|(_, v)| {
        let group = v.binding.as_ref().map(|b| b.group);
        group == Some(1)
    });
    let bindings = bindings.count();
    if bindings != kernel.access.len() || bindings > MAX_BINDINGS {
        return Err(format!(
            "{bindings} bindings, access is `{}`",
            kernel.access
        ));
    }

    let options = naga::back::msl::Options {
        lang_version: (2, 4),
        fake_missing_bindings: true,
        zero_initialize_workgroup_memory: false,
        ..Default::default()
    };
    let pipeline = naga::back::msl::PipelineOptions::default();
    let (msl, _) = naga::back::msl::write_string(&module, &info, &options, &pipeline)
        .map_err(|e| e.to_string())?;
    match msl.contains("kernel void") {
        true => Ok(()),
        false => Err("no kernel in the translation".to_owned()),
    }
}

#[test]
fn names_are_unique_within_their_constants() {
    let mut seen = std::collections::HashSet::new();
    for (kernel, constants) in all() {
        assert!(
            seen.insert((kernel.name, constants)),
            "{} twice",
            kernel.name
        );
    }
}
