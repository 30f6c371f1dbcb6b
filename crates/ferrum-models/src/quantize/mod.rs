//! Making a quantised GGUF file of a model in floats.
//!
//! A [`Plan`] names every tensor of the new file and its type (`recipe`). Writing it goes tensor by
//! tensor and within one in runs of rows (`rows`), of which a few are in work at a time, so memory stays
//! small whatever the size of the model. Threads encode runs while the finished ones are written in their
//! order (`pipeline`). Each row is encoded by itself, so the file does not depend on how many there are.

mod hf_model;
mod item;
mod metadata;
mod pipeline;
mod recipe;
mod recurrent;
mod rows;
mod source;

pub use ferrum_quant::Search;
pub use recipe::{RECIPES, Recipe};

use ferrum_formats::gguf::Writer;
use ferrum_formats::{Imatrix, ModelSource};
use ferrum_types::{Error, GgufQuantType, Result};
use item::{From, Item};
use pipeline::in_order;
use rows::{Order, Rows};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Numbers of a run, but that it has a row at least: few enough for the caches, and enough for a large write.
const RUN: usize = 1 << 19;

/// Bytes of the source that are read before their pages are given back.
const KEPT: usize = 64 << 20;

/// How a file is made.
#[derive(Clone, Copy, Debug)]
pub struct QuantizeOptions<'a> {
    /// Types of tensors.
    pub recipe: Recipe,
    /// What columns weigh, if measured.
    pub imatrix: Option<&'a Imatrix>,
    /// How long scales are searched for.
    pub search: Search,
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
        let mut properties = source::model_properties(source, &items)?;
        properties.importance = options.imatrix.is_some();
        let mut plan = Plan {
            source,
            options,
            tensors: Vec::with_capacity(items.len()),
        };
        for item in items {
            let quant_type = match item.from {
                // They are few, and written as they were computed.
                From::Values(_) => None,
                From::Rows { .. } => {
                    recipe::tensor_type(&options.recipe, &properties, &item.name, &item.shape)
                }
            };
            let planned = plan.tensor(item, quant_type)?;
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

    fn tensor(
        &self,
        item: Item,
        quant_type: Option<recipe::TensorQuantType>,
    ) -> Result<PlannedTensor> {
        let wrong = |reason: String| Err(self.error(&item.name, &reason));
        let from = match &item.from {
            From::Values(_) => Some(GgufQuantType::F32),
            From::Rows { ty, .. } => *ty,
        };
        let (ty, fallback) = match (from, quant_type) {
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
        let (mut done, mut kept, total) = (0, 0, self.total_bytes());
        let runs = self.runs()?;
        in_order(
            &runs,
            self.options.threads,
            |run| self.encode(run),
            |run, bytes| {
                body.push(&run.tensor().name, &bytes)?;
                done += bytes.len() as u64;
                kept += run.source_bytes();
                if kept > KEPT {
                    self.source.tensors().release();
                    kept = 0;
                }
                progress(done, total);
                Ok(())
            },
        )?;
        Ok(body.finish()?)
    }

    /// All tensors as runs of rows, in the order of the file.
    fn runs(&self) -> Result<Vec<Run<'_>>> {
        let mut runs = Vec::new();
        for tensor in &self.tensors {
            let (parts, order) = match &tensor.item {
                From::Values(values) => {
                    runs.push(Run::Values(tensor, values));
                    continue;
                }
                From::Rows {
                    parts,
                    pairs,
                    columns,
                    rows,
                    cols,
                    ..
                } => {
                    let (pairs, columns) = (*pairs, *columns);
                    let (rows, cols) = (rows.as_deref(), cols.as_deref());
                    let order = Order {
                        pairs,
                        columns,
                        rows,
                        cols,
                    };
                    (parts, order)
                }
            };
            let source = self.source.tensors();
            let views: Vec<_> = parts
                .iter()
                .map(|part| Ok((source.require(&part.name)?.bytes, part.first)))
                .collect::<Result<_>>()?;
            let Some(rows) = Rows::new(tensor, &views, order, self.importance(tensor)?) else {
                let reason = format!("has shape {:?}, expected whole rows", tensor.shape);
                return Err(self.error(&tensor.name, &reason));
            };
            let rows = Arc::new(rows);
            runs.extend(rows.runs(RUN).map(|range| Run::Rows {
                tensor,
                rows: rows.clone(),
                range,
            }));
        }
        Ok(runs)
    }

    /// The bytes of a run in the new file.
    fn encode(&self, run: &Run<'_>) -> Result<Vec<u8>> {
        match run {
            Run::Values(_, values) => Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
            Run::Rows {
                tensor,
                rows,
                range,
            } => rows
                .encode(range.clone(), self.options.search)
                .map_err(|reason| self.error(&tensor.name, &reason)),
        }
    }

    fn error(&self, tensor: &str, reason: &str) -> Error {
        let path = self.source.tensors().path_hint().display();
        let tensor = tensor.escape_debug();
        Error::Model(format!("{path}: tensor \"{tensor}\" {reason}"))
    }
}

/// What one thread encodes at a time.
enum Run<'p> {
    /// A computed tensor.
    Values(&'p PlannedTensor, &'p [f32]),
    /// Rows of a tensor.
    Rows {
        tensor: &'p PlannedTensor,
        rows: Arc<Rows<'p>>,
        range: Range<usize>,
    },
}

impl Run<'_> {
    fn tensor(&self) -> &PlannedTensor {
        match self {
            Run::Values(tensor, _) | Run::Rows { tensor, .. } => tensor,
        }
    }

    fn source_bytes(&self) -> usize {
        match self {
            Run::Values(..) => 0,
            Run::Rows { rows, range, .. } => range.len() * rows.in_bytes(),
        }
    }
}
