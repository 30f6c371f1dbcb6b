//! Packed weights that are kept between runs.
//!
//! Packing reads every byte of a model once at load. The result depends on the source, the layout of
//! panels and the level alone, so a [`PackedStore`] can keep it and give it back as mapped memory, which is
//! neither copied nor computed. The store is a trait: this crate knows no files. What it gives back is
//! outside data, so shapes, sizes and alignment are checked against each other before a kernel sees them;
//! that the bytes are those that were packed is the store's to check.

pub use super::store::{PackedEntry, PackedKey, PackedStore};

use super::exec::Exec;
use super::gemm::pack::{CpuWeight, Elements};
use super::gemm::tile::PANEL;
use super::isa::Level;
use super::memory::SharedBytes;
use super::moe::{CpuExperts, Matrices};
use super::quant::format::{CodeLayout, ScaleLayout, UNIT};
use super::quant::groups::GroupFormat;
use super::quant::pack::{
    FormatVisitor, PackedFormat, PackedMatrix, SignFlip, is_packed, panel_bytes,
};
use super::quant::{CpuQuantWeight, Part};
use ferrum_quant::compressed_tensors::PackedZeros;
use ferrum_quant::gptq::ZeroPoints;
use ferrum_quant::weights::{GgufRows, QuantWeights};
use ferrum_types::{ExpertShape, GgufQuantType, MatShape, Result, SumSplit, WeightPart};

/// Version of the bytes of panels and of their descriptions. A change of either, or of which matrices a
/// loader packs together, needs another number: the test `the_layout_has_its_version` notices most.
const LAYOUT: u32 = 1;

/// What panels are aligned to: a cache line.
const ALIGN: usize = 64;

/// Bytes at both ends of a tensor that a key holds.
const SAMPLE: usize = 64;

/// What packed weights depend on besides their source: the version of the layout, and what the level changes of it.
pub fn layout(level: Level) -> String {
    let flip = level.run_bytes(SignFlip);
    let bf16 = if level.has_bf16() { "-bf16" } else { "" };
    let tiles = if level.has_tiles() { "-amx" } else { "" };
    let split = if level.splits_f32() { "-split" } else { "" };
    format!("{LAYOUT}-{flip:02x}{bf16}{tiles}{split}")
}

impl PackedKey {
    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Adds a number.
    pub fn number(&mut self, n: usize) {
        self.0.extend((n as u64).to_le_bytes());
    }

    /// The length and both ends of a tensor. They lie in pages that its neighbours in the file share, so a
    /// key reads about one page of each.
    fn tensor(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.0.extend(&bytes[..bytes.len().min(SAMPLE)]);
        self.0.extend(&bytes[bytes.len().saturating_sub(SAMPLE)..]);
    }

    /// Floats, one part below the other.
    pub fn dense(&mut self, parts: &[WeightPart<'_>], cols: usize) {
        self.number(cols);
        self.number(parts.len());
        for part in parts {
            self.number(part.dtype as usize);
            self.rows(part.rows, part.row_stride);
            self.tensor(part.bytes);
        }
    }

    /// ggml blocks, one part below the other.
    pub fn blocks(&mut self, parts: &[GgufRows<'_>], cols: usize) {
        self.number(cols);
        self.number(parts.len());
        for part in parts {
            self.block_part(part);
        }
    }

    fn block_part(&mut self, part: &GgufRows<'_>) {
        self.number(part.ty.id() as usize);
        self.rows(part.rows, part.row_stride);
        self.tensor(part.bytes);
        if part.factor != 1.0 {
            self.number(part.factor.to_bits() as usize);
        }
    }

    /// Rows of a part, and how far they lie apart where they do not follow each other.
    fn rows(&mut self, rows: usize, row_stride: Option<usize>) {
        self.number(rows);
        if let Some(stride) = row_stride {
            // No tensor is so long, and its length comes here where rows follow each other.
            self.number(usize::MAX);
            self.number(stride);
        }
    }

    /// Layers of any scheme, one below the other.
    pub fn layers(&mut self, parts: &[QuantWeights<'_>], cols: usize) {
        self.number(cols);
        self.number(parts.len());
        for part in parts {
            match part {
                QuantWeights::Gptq(layer) => {
                    let minus_one = layer.zero_points == ZeroPoints::MinusOne;
                    self.layer(
                        0,
                        (layer.out_features, layer.group_size),
                        usize::from(minus_one),
                    );
                    self.number(layer.bits as usize);
                    for bytes in [layer.qweight, layer.qzeros, layer.scales] {
                        self.tensor(bytes);
                    }
                    self.tensor(layer.g_idx.unwrap_or_default());
                }
                QuantWeights::Awq(layer) => {
                    self.layer(1, (layer.out_features, layer.group_size), 0);
                    for bytes in [layer.qweight, layer.qzeros, layer.scales] {
                        self.tensor(bytes);
                    }
                }
                QuantWeights::PackQuantized(layer) => {
                    let (kind, zeros) = match layer.zeros {
                        PackedZeros::None => (0, &[][..]),
                        PackedZeros::Words(bytes) => (1, bytes),
                        PackedZeros::Bytes(bytes) => (2, bytes),
                    };
                    self.layer(2, (layer.out_features, layer.group_size), kind);
                    self.number(layer.bits as usize);
                    self.number(layer.scale_dtype as usize);
                    for bytes in [layer.codes, layer.scales, zeros] {
                        self.tensor(bytes);
                    }
                    self.tensor(layer.g_idx.unwrap_or_default());
                }
                QuantWeights::Fp8(layer) => {
                    self.layer(3, (layer.out_features, layer.block[0]), layer.block[1]);
                    self.number(layer.scale_dtype as usize);
                    self.tensor(layer.codes);
                    self.tensor(layer.scales);
                }
                QuantWeights::Gguf(part) => {
                    self.number(4);
                    self.block_part(part);
                }
            }
        }
    }

    fn layer(&mut self, scheme: usize, (rows, group): (usize, usize), variant: usize) {
        for n in [scheme, rows, group, variant] {
            self.number(n);
        }
    }
}

impl Exec {
    /// The weight that the store has for what `key` adds to the name of the operation; else what `pack` makes,
    /// which the store is given, and may put elsewhere.
    pub fn restore_or<T: Packable>(
        &self,
        op: &str,
        key: impl FnOnce(&mut PackedKey),
        pack: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let Some(store) = &self.store else {
            return pack();
        };
        let mut name = PackedKey(op.as_bytes().to_vec());
        key(&mut name);
        if let Some(found) = store.get(&name).and_then(|entry| self.restore(&entry)) {
            return Ok(found);
        }
        let packed = pack()?;
        let mut entry = PackedEntry {
            description: Vec::new(),
            panels: Vec::new(),
        };
        packed.describe(&mut entry);
        let moved = store.put(name, entry);
        let moved = moved.and_then(|entry| self.restore(&entry));
        Ok(moved.unwrap_or(packed))
    }

    /// The weight of an entry; `None` for one that describes no weight, another level's, or one of another size.
    fn restore<T: Packable>(&self, entry: &PackedEntry) -> Option<T> {
        let [panels] = entry.panels.as_slice() else {
            return None;
        };
        let mut reader = Reader {
            description: &entry.description,
            panels,
            at: 0,
            level: self.level,
        };
        let found = T::restore(&mut reader)?;
        let all = reader.description.is_empty() && reader.at == panels.as_slice().len();
        all.then_some(found)
    }
}

/// A loaded weight that can be written as an entry and read back.
pub trait Packable: Sized {
    /// Appends shapes and forms, and the panels that go with them.
    fn describe(&self, entry: &mut PackedEntry);

    /// Takes what [`describe`](Self::describe) appended; `None` for anything else.
    fn restore(reader: &mut Reader<'_>) -> Option<Self>;
}

/// What is left of an entry.
pub struct Reader<'a> {
    description: &'a [u8],
    panels: &'a SharedBytes,
    /// Bytes of the panels that were taken.
    at: usize,
    level: Level,
}

impl Reader<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.description.split_first()?;
        self.description = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<usize> {
        let (first, rest) = self.description.split_first_chunk()?;
        self.description = rest;
        usize::try_from(u64::from_le_bytes(*first)).ok()
    }

    fn shape(&mut self) -> Option<MatShape> {
        let (rows, cols) = (self.number()?, self.number()?);
        Some(MatShape { rows, cols })
    }

    /// The next matrix of `rows` rows, in panels of `panel` bytes.
    fn panels(&mut self, rows: usize, panel: usize) -> Option<SharedBytes> {
        let len = rows.div_ceil(PANEL).checked_mul(panel)?;
        let end = self.at.checked_add(len)?;
        let panels = self.panels.part(self.at..end)?;
        self.at = end.checked_next_multiple_of(ALIGN)?;
        let start = panels.as_slice().as_ptr();
        start.addr().is_multiple_of(ALIGN).then_some(panels)
    }
}

fn put_number(entry: &mut PackedEntry, n: usize) {
    entry.description.extend((n as u64).to_le_bytes());
}

fn put_shape(entry: &mut PackedEntry, shape: MatShape) {
    put_number(entry, shape.rows);
    put_number(entry, shape.cols);
}

impl Packable for CpuWeight {
    fn describe(&self, entry: &mut PackedEntry) {
        entry.description.push(match self.elements {
            Elements::F32 => 0,
            Elements::F16 => 1,
            Elements::Bf16 => 2,
            Elements::Bf16Pairs => 3,
            Elements::E4m3 => 4,
            Elements::F32Tiles => 5,
            Elements::Bf16Tiles => 6,
        });
        put_shape(entry, self.shape);
        entry.panels.push(self.data.clone());
    }

    fn restore(reader: &mut Reader<'_>) -> Option<Self> {
        let elements = match reader.byte()? {
            0 => Elements::F32,
            1 => Elements::F16,
            2 => Elements::Bf16,
            3 => Elements::Bf16Pairs,
            4 => Elements::E4m3,
            5 => Elements::F32Tiles,
            6 => Elements::Bf16Tiles,
            _ => return None,
        };
        let shape = reader.shape()?;
        // Before a product of it is made: none of a panel has more than f32 and a scale.
        shape.cols.checked_mul(PANEL * 8)?;
        let has_level = match elements {
            Elements::Bf16Pairs => reader.level.has_bf16(),
            Elements::F32Tiles => reader.level.splits_f32(),
            Elements::Bf16Tiles => reader.level.has_tiles(),
            _ => true,
        };
        let pairs = matches!(elements, Elements::Bf16Pairs | Elements::Bf16Tiles);
        let whole = !pairs || shape.cols.is_multiple_of(2);
        (has_level && whole).then_some(())?;
        let data = reader.panels(shape.rows, elements.panel_bytes(shape.cols))?;
        Some(Self {
            shape,
            elements,
            sums: SumSplit::WHOLE,
            data,
        })
    }
}

/// Bytes of a panel of `cols` numbers, where that is a whole number of blocks.
struct PanelBytes {
    cols: usize,
}

impl FormatVisitor for PanelBytes {
    type Output = Option<usize>;

    fn run<C: CodeLayout, F: ScaleLayout>(self, _: C, _: F) -> Option<usize> {
        let whole = self.cols.is_multiple_of(UNIT * F::UNITS);
        whole.then(|| panel_bytes::<C, F>(self.cols))
    }
}

impl Packable for PackedMatrix {
    fn describe(&self, entry: &mut PackedEntry) {
        match self.form {
            PackedFormat::Blocks(ty) => {
                entry.description.push(0);
                put_number(entry, ty.id() as usize);
            }
            PackedFormat::Groups(GroupFormat { bits, long, zeros }) => {
                let form = [1, bits as u8, long.into(), zeros.into()];
                entry.description.extend(form);
            }
        }
        entry.description.push(self.flip);
        put_shape(entry, self.shape);
        entry.description.push(self.order.is_some().into());
        for &input in self.order.iter().flatten() {
            entry.description.extend(input.to_le_bytes());
        }
        entry.panels.push(self.data.clone());
    }

    fn restore(reader: &mut Reader<'_>) -> Option<Self> {
        let form = match reader.byte()? {
            0 => {
                let ty = GgufQuantType::from_id(u32::try_from(reader.number()?).ok()?)?;
                is_packed(ty).then_some(PackedFormat::Blocks(ty))?
            }
            1 => PackedFormat::Groups(GroupFormat {
                bits: reader.byte()?.into(),
                long: reader.byte()? != 0,
                zeros: reader.byte()? != 0,
            }),
            _ => return None,
        };
        let flip = reader.byte()?;
        (flip == reader.level.run_bytes(SignFlip)).then_some(())?;
        let shape = reader.shape()?;
        // Before a product of it is made: no block takes more bytes than its numbers in f32.
        shape.cols.checked_mul(PANEL * 8)?;
        let panel = form.with(flip, PanelBytes { cols: shape.cols })??;
        let order = match reader.byte()? {
            0 => None,
            _ => Some(order(reader, shape.cols)?),
        };
        let data = reader.panels(shape.rows, panel)?;
        Some(Self {
            shape,
            form,
            flip,
            order,
            sums: SumSplit::WHOLE,
            data,
        })
    }
}

/// An order of `cols` inputs.
fn order(reader: &mut Reader<'_>, cols: usize) -> Option<Vec<u32>> {
    let (bytes, rest) = reader.description.split_at_checked(cols.checked_mul(4)?)?;
    reader.description = rest;
    let inputs = bytes.as_chunks().0.iter().map(|n| u32::from_le_bytes(*n));
    let order: Vec<u32> = inputs.collect();
    let inside = order.iter().all(|&input| (input as usize) < cols);
    inside.then_some(order)
}

impl Packable for CpuQuantWeight {
    fn describe(&self, entry: &mut PackedEntry) {
        put_shape(entry, self.shape);
        put_number(entry, self.parts.len());
        for part in &self.parts {
            match part {
                Part::Packed(packed) => {
                    entry.description.push(0);
                    packed.describe(entry);
                }
                Part::Dense(dense) => {
                    entry.description.push(1);
                    dense.describe(entry);
                }
            }
        }
    }

    fn restore(reader: &mut Reader<'_>) -> Option<Self> {
        let shape = reader.shape()?;
        let mut rows = 0usize;
        let mut parts = Vec::new();
        for _ in 0..reader.number()? {
            let (part, cols) = match reader.byte()? {
                0 => {
                    let packed = PackedMatrix::restore(reader)?;
                    let cols = packed.shape.cols;
                    (Part::Packed(packed), cols)
                }
                1 => {
                    let dense = CpuWeight::restore(reader)?;
                    let cols = dense.shape.cols;
                    (Part::Dense(dense), cols)
                }
                _ => return None,
            };
            (cols == shape.cols).then_some(())?;
            rows = rows.checked_add(part.rows())?;
            parts.push(part);
        }
        (rows == shape.rows).then_some(Self { shape, parts })
    }
}

impl Packable for CpuExperts {
    fn describe(&self, entry: &mut PackedEntry) {
        let ExpertShape { experts, n, k } = self.shape;
        for number in [experts, n, k] {
            put_number(entry, number);
        }
        match &self.matrices {
            Matrices::Dense(matrices) => {
                entry.description.push(0);
                matrices.iter().for_each(|matrix| matrix.describe(entry));
            }
            Matrices::Packed(matrices) => {
                entry.description.push(1);
                matrices.iter().for_each(|matrix| matrix.describe(entry));
            }
        }
    }

    fn restore(reader: &mut Reader<'_>) -> Option<Self> {
        let (experts, n, k) = (reader.number()?, reader.number()?, reader.number()?);
        let expected = MatShape { rows: n, cols: k };
        let matrices = match reader.byte()? {
            0 => {
                let mut matrices: Vec<CpuWeight> = Vec::new();
                for _ in 0..experts {
                    let matrix = CpuWeight::restore(reader)?;
                    // All matrices of a stack are alike, and none of f32 is in tiles.
                    let first = matrices.first().map_or(matrix.elements, |m| m.elements);
                    let alike = matrix.shape == expected && matrix.elements == first;
                    let alike = alike && matrix.elements != Elements::F32Tiles;
                    alike.then(|| matrices.push(matrix))?;
                }
                Matrices::Dense(matrices)
            }
            1 => {
                let mut matrices: Vec<PackedMatrix> = Vec::new();
                for _ in 0..experts {
                    let matrix = PackedMatrix::restore(reader)?;
                    (matrix.shape == expected).then(|| matrices.push(matrix))?;
                }
                Matrices::Packed(matrices)
            }
            _ => return None,
        };
        let shape = ExpertShape { experts, n, k };
        (experts > 0).then_some(Self { shape, matrices })
    }
}
