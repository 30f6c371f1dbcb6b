//! Making a quantised GGUF file of a model in floats.
//!
//! A [`Plan`] names every tensor of the new file and its type (`recipe`); writing it goes tensor by
//! tensor and within one in runs of rows, so memory stays small whatever the size of the model.
//! Threads share the rows of a run. Each row is encoded by itself, so the file does not depend on
//! how many there are.

mod metadata;
mod recipe;
mod source;

pub use recipe::{RECIPES, Recipe};

use crate::rope::paired_row;
use ferrum_formats::gguf::Writer;
use ferrum_formats::{Imatrix, ModelSource, TensorSource};
use ferrum_quant::{dequantize, encode_row};
use ferrum_types::{Error, GgufQuantType, Result};
use source::{From, Item};
use std::io::Write;
use std::path::Path;

/// Numbers that are encoded before they are written: 64 MiB in f32, which is never all there.
const RUN: usize = 16 << 20;

/// How a file is made.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOptions<'a> {
    /// Types of tensors.
    pub recipe: Recipe,
    /// What columns weigh, if measured.
    pub imatrix: Option<&'a Imatrix>,
    /// Threads that encode; 0 counts as 1.
    pub threads: usize,
    /// Whether tensors that are quantised already are taken, though they lose twice.
    pub requantize: bool,
}

/// A tensor of the new file.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    /// GGUF name.
    pub name: String,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// Type in the source; `None` for computed numbers.
    pub from: Option<GgufQuantType>,
    /// Type in the new file.
    pub ty: GgufQuantType,
    /// Bytes in the new file.
    pub bytes: usize,
    /// Whether its rows do not fit the type that the recipe has for it.
    pub fallback: bool,
    /// Whether importance is known for it.
    pub weighted: bool,
    item: From,
}

impl PlannedTensor {
    /// Whether importance is known for it, needed or not.
    fn fits(&self, imatrix: &Imatrix) -> bool {
        imatrix.get(&self.name).is_some()
    }

    /// Product of the shape.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// What will be written.
pub struct Plan<'m> {
    source: &'m ModelSource,
    options: QuantizeOptions<'m>,
    /// The tensors in the order of the file.
    pub tensors: Vec<PlannedTensor>,
}

impl<'m> Plan<'m> {
    /// Chooses a type for each tensor. Nothing is read but headers.
    ///
    /// # Errors
    /// [`Error::Model`] for a source that cannot be converted, or importance that does not fit it.
    pub fn new(source: &'m ModelSource, options: QuantizeOptions<'m>) -> Result<Self> {
        let items = source::items(source)?;
        let mut shape = source::shape_of(source, &items)?;
        shape.importance = options.imatrix.is_some();
        let mut plan = Plan {
            source,
            options,
            tensors: Vec::with_capacity(items.len()),
        };
        for item in items {
            let choice = recipe::choose(&options.recipe, &shape, &item.name, &item.shape);
            let planned = plan.tensor(item, choice)?;
            plan.tensors.push(planned);
        }
        match options.imatrix {
            Some(imatrix) if !plan.tensors.iter().any(|t| t.fits(imatrix)) => {
                Err(Error::Model(format!(
                    "{}: tells of {} tensors, none of which this model has\nhint: measure the \
                     importance with this very model",
                    imatrix.path.display(),
                    imatrix.len()
                )))
            }
            _ => Ok(plan),
        }
    }

    fn tensor(&self, item: Item, choice: Option<recipe::Choice>) -> Result<PlannedTensor> {
        let wrong = |reason: String| Err(self.error(&item.name, &reason));
        let from = match &item.from {
            From::Values(_) => Some(GgufQuantType::F32),
            From::Rows { ty, .. } => *ty,
        };
        let (ty, fallback) = match (from, choice) {
            (None, _) => {
                let hint = "expected a float type\nhint: take the unquantised checkpoint";
                return wrong(format!("holds no floats, {hint}"));
            }
            (Some(from), _) if from.is_quantized() && !self.options.requantize => {
                return wrong(format!(
                    "has type {from}, expected a float type\nhint: start from the f32, f16 or bf16 \
                     model, or give --requantize and lose quality twice"
                ));
            }
            (Some(_), Some(choice)) => (choice.ty, choice.fallback),
            // What stays small stays exact: readers expect norms and biases in f32.
            (Some(_), None) => (GgufQuantType::F32, false),
        };
        let elements = item
            .shape
            .iter()
            .try_fold(1usize, |n, &dim| n.checked_mul(dim));
        let Some(bytes) = elements.and_then(|n| ty.bytes_for(n)) else {
            return wrong(format!(
                "has shape {:?}, expected whole blocks of {ty}",
                item.shape
            ));
        };
        let mut planned = PlannedTensor {
            name: item.name,
            shape: item.shape,
            from,
            ty,
            bytes,
            fallback,
            weighted: false,
            item: item.from,
        };
        planned.weighted = ty.is_quantized() && self.importance(&planned)?.is_some();
        Ok(planned)
    }

    /// The importance of a tensor's columns, possibly one after the other for several experts.
    fn importance(&self, tensor: &PlannedTensor) -> Result<Option<&'m [f32]>> {
        let Some(imatrix) = self.options.imatrix else {
            return Ok(None);
        };
        let Some(values) = imatrix.get(&tensor.name) else {
            return Ok(None);
        };
        let row = tensor.shape.last().copied().unwrap_or(1);
        let stacked = match tensor.shape.as_slice() {
            [experts, _, _] => experts.saturating_mul(row),
            _ => row,
        };
        if values.len() == row || values.len() == stacked {
            return Ok(Some(values));
        }
        Err(Error::Model(format!(
            "{}: tensor \"{}\": found {} values, expected {row}, one for each column of the model's \
             tensor\nhint: measure the importance with this very model",
            imatrix.path.display(),
            tensor.name.escape_debug(),
            values.len(),
        )))
    }

    /// Bytes of all tensors in the new file.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.bytes as u64).sum()
    }

    /// Numbers of all tensors.
    pub fn total_elements(&self) -> u64 {
        self.tensors
            .iter()
            .map(|tensor| tensor.elements() as u64)
            .sum()
    }

    /// Writes the file to `out`; `path` is for messages. `progress` is called with bytes written and in
    /// all.
    ///
    /// # Errors
    /// [`Error::Model`] for a weight that is not finite, or a source that cannot be said in GGUF;
    /// otherwise what the system says of `out`.
    pub fn write<W: Write>(
        &self,
        path: &Path,
        out: W,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<W> {
        let mut head = Writer::new(path);
        let used = self.tensors.iter().filter(|tensor| tensor.weighted).count();
        let imatrix = self.options.imatrix.map(|imatrix| (imatrix, used));
        metadata::write(&mut head, self.source, &self.options.recipe, imatrix)?;
        for tensor in &self.tensors {
            head.declare(&tensor.name, &tensor.shape, tensor.ty)?;
        }
        let mut body = head.start(out)?;
        let (mut done, total) = (0, self.total_bytes());
        for tensor in &self.tensors {
            self.encode(tensor, &mut |bytes| {
                body.push(&tensor.name, bytes)?;
                done += bytes.len() as u64;
                progress(done, total);
                Ok(())
            })?;
        }
        Ok(body.finish()?)
    }

    /// Encodes one tensor in runs of rows and hands each to `push`.
    fn encode(
        &self,
        tensor: &PlannedTensor,
        push: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let (parts, pairs) = match &tensor.item {
            From::Values(values) => {
                let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
                return push(&bytes);
            }
            From::Rows { parts, pairs, .. } => (parts, *pairs),
        };
        let tensors = self.tensors_of_source();
        let views: Vec<_> = parts
            .iter()
            .map(|part| Ok((tensors.require(&part.name)?.bytes, part.first)))
            .collect::<Result<_>>()?;
        let Some(rows) = Rows::new(tensor, &views, pairs, self.importance(tensor)?) else {
            let reason = format!("has shape {:?}, expected whole rows", tensor.shape);
            return Err(self.error(&tensor.name, &reason));
        };
        let run = (RUN / rows.cols.max(1)).clamp(1, rows.count.max(1));
        let mut bytes = vec![0; run.min(rows.count) * rows.out_bytes];
        for first in (0..rows.count).step_by(run) {
            let here = run.min(rows.count - first);
            let bytes = &mut bytes[..here * rows.out_bytes];
            rows.encode_run(first, bytes, self.options.threads)
                .map_err(|reason| self.error(&tensor.name, &reason))?;
            push(bytes)?;
        }
        tensors.release();
        Ok(())
    }

    fn tensors_of_source(&self) -> &dyn TensorSource {
        match self.source {
            ModelSource::Gguf(gguf) => gguf,
            ModelSource::Hf(folder) => &folder.tensors,
        }
    }

    fn error(&self, tensor: &str, reason: &str) -> Error {
        let path = self.tensors_of_source().path_hint().display();
        let tensor = tensor.escape_debug();
        Error::Model(format!("{path}: tensor \"{tensor}\" {reason}"))
    }
}

/// A tensor's rows on their way from one type to another.
struct Rows<'a> {
    /// The bytes of as many rows each.
    parts: Vec<&'a [u8]>,
    from: GgufQuantType,
    to: GgufQuantType,
    count: usize,
    cols: usize,
    /// Bytes of a row in the source and in the new file.
    in_bytes: usize,
    out_bytes: usize,
    pairs: usize,
    importance: Option<&'a [f32]>,
}

impl<'a> Rows<'a> {
    /// From the bytes of the source's tensors, and the rows of each where the parts begin. `None`: they
    /// have no such rows, which readers have excluded.
    fn new(
        tensor: &PlannedTensor,
        views: &[(&'a [u8], usize)],
        pairs: usize,
        importance: Option<&'a [f32]>,
    ) -> Option<Self> {
        // A vector is a column of numbers where rows are reordered, else one row.
        let cols = match (tensor.shape.as_slice(), pairs) {
            ([_], 1..) => 1,
            (shape, _) => shape.last().copied().unwrap_or(1),
        };
        let count = tensor.elements().checked_div(cols)?;
        let from = tensor.from?;
        let in_bytes = from.bytes_for(cols)?;
        let part_bytes = count.checked_div(views.len())?.checked_mul(in_bytes)?;
        let part = |&(bytes, first): &(&'a [u8], usize)| {
            let bytes = bytes.get(first.checked_mul(in_bytes)?..)?;
            bytes.get(..part_bytes)
        };
        let parts = views.iter().map(part).collect::<Option<Vec<_>>>()?;
        (part_bytes.checked_mul(parts.len())? == in_bytes.checked_mul(count)?).then_some(Rows {
            parts,
            from,
            to: tensor.ty,
            count,
            cols,
            in_bytes,
            out_bytes: tensor.ty.bytes_for(cols)?,
            pairs,
            importance,
        })
    }

    /// Encodes the rows from `first` on that fill `out`, shared evenly among threads.
    fn encode_run(&self, first: usize, out: &mut [u8], threads: usize) -> Result<(), String> {
        let rows = out.len() / self.out_bytes;
        // A thread for a few rows costs more than it saves.
        let threads = threads.clamp(1, (rows * self.cols / 4096).max(1));
        let share = rows.div_ceil(threads);
        if threads == 1 {
            return self.encode_rows(first, out);
        }
        std::thread::scope(|scope| {
            let parts = out.chunks_mut(share * self.out_bytes).enumerate();
            let workers: Vec<_> = parts
                .map(|(i, out)| scope.spawn(move || self.encode_rows(first + i * share, out)))
                .collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, _>| {
                worker
                    .join()
                    .unwrap_or_else(|_| Err("could not be encoded: a thread has failed".into()))
            };
            // All are waited for; of several errors the first counts, whichever thread was faster.
            let results: Vec<Result<(), String>> = workers.into_iter().map(join).collect();
            results.into_iter().collect()
        })
    }

    fn encode_rows(&self, first: usize, out: &mut [u8]) -> Result<(), String> {
        let mut values = vec![0.0; self.cols];
        for (row, out) in (first..).zip(out.chunks_exact_mut(self.out_bytes)) {
            let from = paired_row(row, self.count, self.pairs);
            let each = self.count / self.parts.len();
            let bytes = &self.parts[from / each][from % each * self.in_bytes..][..self.in_bytes];
            let failed = |e: ferrum_quant::QuantError| format!("cannot be converted: {e}");
            dequantize(self.from, bytes, &mut values).map_err(failed)?;
            self.check(row, &values)?;
            let importance = self.importance.map(|all| {
                let experts = all.len() / self.cols;
                let expert = row / (self.count / experts).max(1);
                &all[expert * self.cols..][..self.cols]
            });
            encode_row(self.to, &values, importance, out).map_err(failed)?;
        }
        Ok(())
    }

    /// Refuses numbers that the new type would turn into others without a word.
    fn check(&self, row: usize, values: &[f32]) -> Result<(), String> {
        const F16_MAX: f32 = 65504.0;
        // Scales of blocks are numbers of f16, less those of MXFP4.
        let narrow = self.to == GgufQuantType::F16 || self.to.is_quantized();
        let most = match narrow && self.to != GgufQuantType::MXFP4 {
            true => F16_MAX,
            false => f32::MAX,
        };
        match values.iter().position(|v| v.is_nan() || v.abs() > most) {
            None => Ok(()),
            Some(col) => {
                let found = values[col];
                let hint = match found.is_finite() {
                    true => "take bf16 or f32",
                    false => "the checkpoint is damaged, fetch it again",
                };
                Err(format!(
                    "holds {found} in row {row}, column {col}, expected finite numbers up to {most:e}\
                     \nhint: {hint}"
                ))
            }
        }
    }
}
