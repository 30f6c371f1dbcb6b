//! The files that `ferrum quantize` makes of every fixture: in floats, the logits of `transformers`; in blocks, near
//! them, computed on as blocks.

use crate::support::{
    compare, exact_cpu, expected, fixture_dirs, logits_in_chunks, max_difference, open, runner_in,
};
use ferrum_formats::ModelSource;
use ferrum_kernels::cpu::CpuBackend;
use ferrum_kernels::{Backend, KvF32, LlmBackend};
use ferrum_models::families::FAMILIES;
use ferrum_models::quantize::{Plan, QuantizeOptions, Search};
use ferrum_models::{
    Dequantized, FeedForwardSpec, KvLayout, Model, Moe, Native, WeightForm, family_for,
};
use ferrum_types::TokenId;
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

/// Fixtures that no file is made of, and a part of what is said of each.
const REFUSED: [(&str, &str); 32] = [
    ("deepseek3-fp8", "quantised already"),
    ("deepseek3-halves", "a rotation of halves"),
    ("falcon-every-head", "query_key_value.bias"),
    ("gpt-oss-blocks", "quantised already"),
    ("gpt-oss-mxfp4", "quantised already"),
    ("gpt2-layers", "a factor on scores of its own in each layer"),
    ("llama-awq", "quantised already"),
    ("llama-dynamic", "RoPE scaling of type dynamic"),
    ("llama-dynamic-short", "RoPE scaling of type dynamic"),
    ("llama-fp8-block", "quantised already"),
    ("llama-fp8-channel", "quantised already"),
    ("llama-fp8-odd", "quantised already"),
    ("llama-fp8-tensor", "quantised already"),
    ("llama-gptq2", "quantised already"),
    ("llama-gptq3", "quantised already"),
    ("llama-gptq4", "quantised already"),
    ("llama-gptq4-dynamic", "quantised already"),
    ("llama-gptq4-odd", "quantised already"),
    ("llama-gptq4-order", "quantised already"),
    ("llama-gptq4-v2", "quantised already"),
    ("llama-gptq8", "quantised already"),
    ("llama-packed4", "quantised already"),
    ("llama-packed4-order", "quantised already"),
    ("llama-packed8", "quantised already"),
    ("llama4", "the choice of layers, or of chunks and factors"),
    ("qwen2-moe-sparse", "experts in some layers"),
    ("qwen3-moe-fp8", "quantised already"),
    ("qwen3-moe-gptq4", "quantised already"),
    ("qwen3-moe-gptq4-order", "quantised already"),
    ("qwen3-moe-sparse", "experts in some layers"),
    ("qwen3-next", "experts in some layers"),
    ("smollm3-layers", "the choice of layers without rotation"),
];

/// Families without a fixture here whose matrices divide into blocks of 32: their fixtures lie elsewhere.
const WITHOUT_BLOCKS: [&str; 2] = ["gemma3-vision", "gemma-embedding"];

/// Writes what `ferrum quantize --type ty` would, and gives the share of numbers that are in blocks.
fn convert(source: &ModelSource, ty: &str, path: &Path) -> Result<f64, String> {
    let options = QuantizeOptions {
        recipe: ty.parse().unwrap(),
        imatrix: None,
        search: Search::default(),
        threads: 1,
        requantize: false,
    };
    let plan = Plan::new(source, options).map_err(|e| e.to_string())?;
    let written = plan.write(path, File::create(path).unwrap(), &mut |_, _| ());
    written.map_err(|e| e.to_string())?;
    let tensors = plan
        .tensors
        .iter()
        .filter(|tensor| tensor.ty.is_quantized());
    let numbers: usize = tensors.map(|tensor| tensor.elements()).sum();
    Ok(numbers as f64 / plan.total_elements() as f64)
}

fn logits<B: LlmBackend, W: WeightForm<B>>(
    device: &B,
    model: &Model,
    tokens: &[TokenId],
) -> Vec<f32> {
    let layout = KvLayout::Paged { block_size: 8 };
    let mut runner = runner_in::<B, KvF32, W>(device, model, layout);
    logits_in_chunks(&mut runner, tokens, &[usize::MAX])
}

fn has_experts(model: &Model) -> bool {
    let mut layers = model.spec.layers.iter();
    layers.any(|layer| matches!(layer.feed_forward, FeedForwardSpec::Moe(_)))
}

#[test]
fn every_family_computes_on_the_files_made_of_it() {
    let (device, exact) = (CpuBackend::open(0).unwrap(), exact_cpu());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let (mut refused, mut in_blocks, mut failures) = (vec![], BTreeSet::new(), vec![]);
    for folder in fixture_dirs() {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let source = ModelSource::open(&folder).unwrap();
        let whole = expected(&folder.join("expected.safetensors"));
        for ty in ["f32", "q8_0", "q4_0"] {
            let share = match convert(&source, ty, &path) {
                Ok(share) => share,
                Err(error) => {
                    refused.push((name.to_owned(), error));
                    break;
                }
            };
            let model = open(&path);
            let vocab = model.spec.vocab_size;
            let mut check = |holds: bool, what: String| {
                println!("{name} {ty}: {what}");
                if !holds {
                    failures.push(format!("{name} {ty}: {what}"));
                }
            };
            if ty == "f32" {
                let found = logits::<_, Moe<Native>>(&exact, &model, &whole.tokens);
                let difference = max_difference(&whole.logits, &found);
                check(difference <= 1e-4, format!("differs by {difference:.1e}"));
                continue;
            }
            let found = logits::<_, Moe<Native>>(&device, &model, &whole.tokens);
            let (kl, same) = compare(&whole.logits, &found, vocab);
            // How far it is to the logits of other positions; in four bits, random weights are not near themselves.
            let mut others = whole.logits.clone();
            others.rotate_right(vocab);
            let (other, _) = compare(&whole.logits, &others, vocab);
            let experts = has_experts(&model);
            let near = match ty {
                "q8_0" => kl < if experts { 5e-2 } else { 1.5e-2 } && (experts || same >= 0.7),
                _ => kl < 0.4 * other,
            };
            let what = format!("KL {kl:.1e} of {other:.1}, same best token in {same:.2}");
            check(near, format!("{what}, {share:.2} in blocks"));
            // What activations of eight bits change.
            let plain = logits::<_, Moe<Dequantized>>(&exact, &model, &whole.tokens);
            let (kl, same) = compare(&plain, &found, vocab);
            let near = kl < if experts { 1e-1 } else { 1e-2 } && (experts || same >= 0.7);
            check(near, format!("KL {kl:.1e} from itself in f32, {same:.2}"));
            if share > 0.75 {
                in_blocks.insert((family_for(&source).unwrap().name, ty));
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    let names: Vec<_> = refused.iter().map(|(name, _)| &**name).collect();
    assert_eq!(names, REFUSED.map(|(name, _)| name), "{refused:#?}");
    for ((name, error), (_, part)) in refused.iter().zip(REFUSED) {
        assert!(error.contains(part), "{name}: {error}");
    }
    // Rows that are no whole blocks stay in f16, so each family needs a fixture that has few of them.
    for family in FAMILIES {
        let missing = ["q8_0", "q4_0"].map(|ty| !in_blocks.contains(&(family.name, ty)));
        let known = WITHOUT_BLOCKS.contains(&family.name);
        assert_eq!(missing, [known; 2], "{}: in blocks", family.name);
    }
}
