//! How a matrix lies in its file: as one tensor, or as the several of a quantised layer.
//!
//! The tensors decide whether a layer is quantised (what a config says of modules left alone agrees
//! with them, or the file could not be read at all); the config decides what the integers mean. Shapes
//! and indices are checked against both here, so that errors name file and tensor.

use crate::stored::to_f32;
use ferrum_formats::hf::{
    AwqConfig, CompressedTensorsConfig, Fp8Config, GptqConfig, QuantizationConfig,
};
use ferrum_formats::{HfFolder, ModelSource, TensorDtype, TensorSource, TensorView};
use ferrum_kernels::{
    AwqWeights, Fp8Weights, GgufRows, GptqWeights, GptqZeroPoints, MatShape, PackQuantizedWeights,
    PackedZeros, QuantWeights,
};
use ferrum_types::{Dtype, Error, GgufQuantType, Result, SrcDtype};

/// Block of FP8 scales where a config gives none.
const FP8_BLOCK: [usize; 2] = [128, 128];

/// Refuses schemes that cannot be read, before anything is loaded.
pub(crate) fn check_scheme(folder: &HfFolder) -> Result<()> {
    let Some(scheme) = &folder.quantization else {
        return Ok(());
    };
    let refuse = |field: &str, found: &str, expected: &str| {
        Err(Error::Model(format!(
            "{}: field \"quantization_config.{field}\": found {found}, expected {expected}\nhint: use \
             another quantisation of the model, the unquantised one, or a GGUF file",
            folder.config.path().display()
        )))
    };
    match scheme {
        QuantizationConfig::Gptq(gptq) => {
            if !matches!(gptq.bits, 2 | 3 | 4 | 8) {
                return refuse("bits", &gptq.bits.to_string(), "2, 3, 4 or 8");
            }
            match gptq.checkpoint_format.as_str() {
                "gptq" | "gptq_v2" => Ok(()),
                other => refuse("checkpoint_format", &quoted(other), "gptq or gptq_v2"),
            }
        }
        QuantizationConfig::Awq(awq) => match (awq.bits, awq.version.as_str()) {
            (4, "gemm") if awq.zero_point => Ok(()),
            (4, "gemm") => refuse("zero_point", "false", "true"),
            (4, other) => refuse("version", &quoted(other), "gemm"),
            (bits, _) => refuse("bits", &bits.to_string(), "4"),
        },
        QuantizationConfig::CompressedTensors(compressed) => {
            let expected = "pack-quantized or float-quantized";
            for group in &compressed.groups {
                let format = group.format.as_ref().unwrap_or(&compressed.format);
                let Some(weights) = &group.weights else {
                    continue;
                };
                match format.as_str() {
                    "pack-quantized" if matches!(weights.num_bits, 4 | 8) => {}
                    "pack-quantized" => {
                        return refuse("num_bits", &weights.num_bits.to_string(), "4 or 8");
                    }
                    "float-quantized" | "naive-quantized"
                        if weights.kind == "float" && weights.num_bits == 8 => {}
                    other => return refuse("format", &quoted(other), expected),
                }
            }
            Ok(())
        }
        QuantizationConfig::Fp8(_) => Ok(()),
        // Of experts alone.
        QuantizationConfig::Other(method) if method == "mxfp4" => Ok(()),
        other => refuse(
            "quant_method",
            &quoted(other.method()),
            "gptq, awq, compressed-tensors, fp8 or mxfp4",
        ),
    }
}

/// Text of a file as messages show it: escaped, and not long.
fn quoted(text: &str) -> String {
    let short: String = text.chars().take(64).collect();
    format!("{short:?}")
}

/// The tensors of a file, with what its config says of their quantisation.
#[derive(Clone, Copy)]
pub(crate) struct Checkpoint<'a> {
    tensors: &'a dyn TensorSource,
    scheme: Option<&'a QuantizationConfig>,
}

impl<'a> Checkpoint<'a> {
    pub(crate) fn new(source: &'a ModelSource) -> Self {
        match source {
            ModelSource::Gguf(gguf) => Self {
                tensors: gguf,
                scheme: None,
            },
            ModelSource::Hf(folder) => Self {
                tensors: &folder.tensors,
                scheme: folder.quantization.as_ref(),
            },
        }
    }

    /// The matrix `name` (less `.weight`), which must have this shape.
    ///
    /// # Errors
    /// [`Error::Model`] names the tensor that is missing, or has another shape or type than expected.
    pub(crate) fn matrix(&self, name: &str, shape: MatShape) -> Result<QuantWeights<'a>> {
        let layer = Layer {
            tensors: self.tensors,
            name,
            shape,
        };
        let weights = match self.scheme {
            Some(QuantizationConfig::Gptq(gptq)) if layer.has("qweight") => layer.gptq(gptq),
            Some(QuantizationConfig::Awq(awq)) if layer.has("qweight") => layer.awq(awq),
            Some(QuantizationConfig::CompressedTensors(compressed))
                if layer.has("weight_packed") =>
            {
                layer.packed(compressed)
            }
            Some(QuantizationConfig::CompressedTensors(compressed)) if layer.is_fp8() => {
                let weights = compressed.groups.iter().filter_map(|g| g.weights.as_ref());
                layer.fp8(weights.filter_map(|w| w.block).next().unwrap_or(FP8_BLOCK))
            }
            Some(QuantizationConfig::Fp8(Fp8Config {
                weight_block_size, ..
            })) if layer.is_fp8() => layer.fp8(weight_block_size.unwrap_or(FP8_BLOCK)),
            _ => layer.plain(),
        }?;
        let checked = match &weights {
            QuantWeights::Gptq(layer) => layer.validate(),
            QuantWeights::Awq(layer) => layer.validate(),
            QuantWeights::PackQuantized(layer) => layer.validate(),
            QuantWeights::Fp8(layer) => layer.validate(),
            QuantWeights::Gguf(_) => Ok(()),
        };
        checked.map_err(|reason| layer.error(&format!("layer \"{name}\": {reason}")))?;
        Ok(weights)
    }
}

/// One layer of a checkpoint.
struct Layer<'a, 'n> {
    tensors: &'a dyn TensorSource,
    name: &'n str,
    /// As the model's config has it.
    shape: MatShape,
}

impl<'a> Layer<'a, '_> {
    fn error(&self, text: &str) -> Error {
        Error::Model(format!("{}: {text}", self.tensors.path_hint().display()))
    }

    fn get(&self, suffix: &str) -> Option<TensorView<'a>> {
        self.tensors.get(&format!("{}.{suffix}", self.name))
    }

    fn has(&self, suffix: &str) -> bool {
        self.get(suffix).is_some()
    }

    fn is_fp8(&self) -> bool {
        let weight = self.get("weight");
        weight.is_some_and(|weight| weight.dtype == TensorDtype::Plain(Dtype::F8E4M3))
    }

    /// A tensor that must be there.
    fn require(&self, suffix: &str) -> Result<TensorView<'a>> {
        Ok(self.tensors.require(&format!("{}.{suffix}", self.name))?)
    }

    /// A tensor that must be there with this type and shape.
    fn tensor(&self, suffix: &str, dtype: Dtype, shape: &[usize]) -> Result<TensorView<'a>> {
        let view = self.require(suffix)?;
        if view.dtype != TensorDtype::Plain(dtype) {
            return Err(self.wrong_type(&view, dtype.name()));
        }
        self.check_shape(&view, shape)?;
        Ok(view)
    }

    fn wrong_type(&self, view: &TensorView<'_>, expected: &str) -> Error {
        let (name, found) = (view.name, view.dtype.name());
        self.error(&format!(
            "tensor \"{name}\" has element type {found}, expected {expected}"
        ))
    }

    fn check_shape(&self, view: &TensorView<'_>, shape: &[usize]) -> Result<()> {
        if view.shape == shape {
            return Ok(());
        }
        let MatShape { rows, cols } = self.shape;
        Err(self.error(&format!(
            "tensor \"{}\" has shape {:?}, expected {shape:?} for a layer of {cols} inputs and {rows} \
             outputs",
            view.name, view.shape
        )))
    }

    /// A tensor of floats as scales are.
    fn scales(&self, suffix: &str) -> Result<(TensorView<'a>, SrcDtype)> {
        let view = self.require(suffix)?;
        let dtype = view.dtype.plain().and_then(SrcDtype::from_dtype);
        let dtype = dtype.ok_or_else(|| self.wrong_type(&view, "f16, bf16 or f32"))?;
        Ok((view, dtype))
    }

    /// Floats or ggml blocks.
    fn plain(&self) -> Result<QuantWeights<'a>> {
        let MatShape { rows, cols } = self.shape;
        let view = self.require("weight")?;
        // GGUF files have one row as a vector.
        if view.shape != [rows, cols] && !(rows == 1 && view.shape == [cols]) {
            return Err(self.error(&format!(
                "tensor \"{}\" has shape {:?}, expected [{rows}, {cols}] from the model's config",
                view.name, view.shape
            )));
        }
        let ty = block_type(&view).ok_or_else(|| self.wrong_type(&view, "a float type"))?;
        let factor = match ty {
            GgufQuantType::NVFP4 => self.factor()?,
            _ => 1.0,
        };
        let rows = GgufRows::new(view.bytes, ty, rows);
        Ok(QuantWeights::Gguf(GgufRows { factor, ..rows }))
    }

    /// What the numbers of NVFP4 are multiplied with. (Another number, `input_scale`, is for those who round activations.)
    fn factor(&self) -> Result<f32> {
        match self.get("scale") {
            None => Ok(1.0),
            Some(view) => Ok(nvfp4_factors(self.tensors, &view, 1)?[0]),
        }
    }

    fn gptq(&self, config: &GptqConfig) -> Result<QuantWeights<'a>> {
        let MatShape { rows: n, cols: k } = self.shape;
        let mut bits = u32::from(config.bits);
        let mut group_size = config.group_size.unwrap_or(k);
        if !config.overrides.is_empty() {
            // Some modules differ, and patterns say which; the shapes say how.
            let words = |tensor: &str, at: usize| Some(*self.get(tensor)?.shape.get(at)?);
            if let Some(words) = words("qweight", 0)
                && let Some(found) = [2, 3, 4, 8].into_iter().find(|b| k * b / 32 == words)
            {
                bits = found as u32;
            }
            if let Some(groups) = words("scales", 0).filter(|&groups| groups > 0) {
                group_size = if k.div_ceil(group_size.max(1)) == groups {
                    group_size
                } else {
                    k.div_ceil(groups)
                };
            }
        }
        let words = |count: usize| count / 32 * bits as usize + count % 32 * bits as usize / 32;
        let groups = k.div_ceil(group_size.max(1));
        // Without it, the order of activations is lost.
        let g_idx = match config.desc_act || self.has("g_idx") {
            true => Some(self.tensor("g_idx", Dtype::I32, &[k])?.bytes),
            false => None,
        };
        Ok(QuantWeights::Gptq(GptqWeights {
            bits,
            group_size,
            zero_points: match config.checkpoint_format.as_str() {
                "gptq_v2" => GptqZeroPoints::AsIs,
                _ => GptqZeroPoints::MinusOne,
            },
            in_features: k,
            out_features: n,
            qweight: self.tensor("qweight", Dtype::I32, &[words(k), n])?.bytes,
            qzeros: self
                .tensor("qzeros", Dtype::I32, &[groups, words(n)])?
                .bytes,
            scales: self.tensor("scales", Dtype::F16, &[groups, n])?.bytes,
            g_idx,
        }))
    }

    fn awq(&self, config: &AwqConfig) -> Result<QuantWeights<'a>> {
        let MatShape { rows: n, cols: k } = self.shape;
        let group_size = config.group_size.unwrap_or(k);
        let groups = k / group_size.max(1);
        let ints = |suffix: &str, rows: usize| self.tensor(suffix, Dtype::I32, &[rows, n / 8]);
        Ok(QuantWeights::Awq(AwqWeights {
            group_size,
            in_features: k,
            out_features: n,
            qweight: ints("qweight", k)?.bytes,
            qzeros: ints("qzeros", groups)?.bytes,
            scales: self.tensor("scales", Dtype::F16, &[groups, n])?.bytes,
        }))
    }

    /// `pack-quantized`; with several groups of modules, the one whose sizes fit this layer's tensors.
    fn packed(&self, config: &CompressedTensorsConfig) -> Result<QuantWeights<'a>> {
        let MatShape { rows: n, cols: k } = self.shape;
        let (codes, (scales, scale_dtype)) =
            (self.require("weight_packed")?, self.scales("weight_scale")?);
        let args = config.groups.iter().filter_map(|g| g.weights.as_ref());
        let mut sizes = args.map(|args| (u32::from(args.num_bits), args.group_size.unwrap_or(k)));
        let words = |bits: u32, count: usize| count.div_ceil(32 / bits.clamp(1, 32) as usize);
        let fits = |&(bits, group): &(u32, usize)| {
            let groups = k.div_ceil(group.max(1));
            codes.shape == [n, words(bits, k)] && scales.shape.get(1).is_none_or(|g| *g == groups)
        };
        let first = sizes.clone().next().unwrap_or((4, k));
        let (bits, mut group_size) = sizes.find(fits).unwrap_or(first);
        if scales.shape == [n, 1] || scales.shape == [n] {
            group_size = k;
        }
        let groups = k.div_ceil(group_size.max(1));
        if codes.dtype != TensorDtype::Plain(Dtype::I32) {
            return Err(self.wrong_type(&codes, Dtype::I32.name()));
        }
        self.check_shape(&codes, &[n, words(bits, k)])?;
        if scales.shape != [n] || groups > 1 {
            self.check_shape(&scales, &[n, groups])?;
        }
        if self.has("weight_shape") {
            self.check_stored_shape()?;
        }
        let zeros = match self.get("weight_zero_point").map(|view| view.dtype) {
            None => PackedZeros::None,
            Some(TensorDtype::Plain(Dtype::I8)) => {
                let view = self.tensor("weight_zero_point", Dtype::I8, &[n, groups])?;
                PackedZeros::Bytes(view.bytes)
            }
            Some(_) => {
                let shape = [words(bits, n), groups];
                let view = self.tensor("weight_zero_point", Dtype::I32, &shape)?;
                PackedZeros::Words(view.bytes)
            }
        };
        let g_idx = match self.has("weight_g_idx") {
            true => Some(self.tensor("weight_g_idx", Dtype::I32, &[k])?.bytes),
            false => None,
        };
        Ok(QuantWeights::PackQuantized(PackQuantizedWeights {
            bits,
            group_size,
            in_features: k,
            out_features: n,
            codes: codes.bytes,
            scales: scales.bytes,
            scale_dtype,
            zeros,
            // -1: not in use.
            g_idx: g_idx.filter(|bytes| bytes.iter().any(|&byte| byte != 0xff)),
        }))
    }

    /// Holds `weight_shape`, two integers, against the model's config.
    fn check_stored_shape(&self) -> Result<()> {
        let view = self.require("weight_shape")?;
        let wide = view.dtype == TensorDtype::Plain(Dtype::I64);
        let view = self.tensor(
            "weight_shape",
            if wide { Dtype::I64 } else { Dtype::I32 },
            &[2],
        )?;
        let number = |bytes: &[u8]| {
            let mut all = [0; 8];
            all[..bytes.len()].copy_from_slice(bytes);
            u64::from_le_bytes(all)
        };
        let found: Vec<u64> = view
            .bytes
            .chunks_exact(view.bytes.len() / 2)
            .map(number)
            .collect();
        let MatShape { rows, cols } = self.shape;
        if found == [rows as u64, cols as u64] {
            return Ok(());
        }
        Err(self.error(&format!(
            "tensor \"{}\" holds {found:?}, expected [{rows}, {cols}] from the model's config",
            view.name
        )))
    }

    fn fp8(&self, block: [usize; 2]) -> Result<QuantWeights<'a>> {
        let MatShape { rows: n, cols: k } = self.shape;
        let codes = self.tensor("weight", Dtype::F8E4M3, &[n, k])?;
        let suffix = match self.has("weight_scale_inv") {
            true => "weight_scale_inv",
            false => "weight_scale",
        };
        let (scales, scale_dtype) = self.scales(suffix)?;
        let block = match *scales.shape {
            [] | [1] | [1, 1] => [n.max(1), k.max(1)],
            [rows] | [rows, 1] if rows == n => [1, k.max(1)],
            _ => {
                let blocks = [n.div_ceil(block[0].max(1)), k.div_ceil(block[1].max(1))];
                self.check_shape(&scales, &blocks)?;
                block
            }
        };
        Ok(QuantWeights::Fp8(Fp8Weights {
            in_features: k,
            out_features: n,
            block,
            codes: codes.bytes,
            scales: scales.bytes,
            scale_dtype,
        }))
    }
}

/// The factors of so many matrices of NVFP4, which are finite.
///
/// # Errors
/// [`Error::Model`] for another count, another type, or a factor that is no finite number.
pub(crate) fn nvfp4_factors(
    tensors: &dyn TensorSource,
    view: &TensorView<'_>,
    count: usize,
) -> Result<Vec<f32>> {
    let factors = to_f32(tensors, view)?;
    if factors.len() != count || factors.iter().any(|factor| !factor.is_finite()) {
        let (path, found) = (tensors.path_hint().display(), factors.len());
        return Err(Error::Model(format!(
            "{path}: tensor \"{}\" has {found} numbers, expected {count} finite scales of NVFP4",
            view.name
        )));
    }
    Ok(factors)
}

/// The block type of a tensor of numbers, floats among them.
pub(crate) fn block_type(view: &TensorView<'_>) -> Option<GgufQuantType> {
    match view.dtype {
        TensorDtype::Quant(ty) => Some(ty),
        TensorDtype::Plain(Dtype::F32) => Some(GgufQuantType::F32),
        TensorDtype::Plain(Dtype::F16) => Some(GgufQuantType::F16),
        TensorDtype::Plain(Dtype::BF16) => Some(GgufQuantType::BF16),
        TensorDtype::Plain(Dtype::F64) => Some(GgufQuantType::F64),
        _ => None,
    }
}
