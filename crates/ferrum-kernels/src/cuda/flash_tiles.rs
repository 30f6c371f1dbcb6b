//! The kernels of attention on tensor cores: their tiles, and which file has them for what a cache holds.

use super::CudaBackend;
use super::compiler::KernelFile;
use super::role::CudaAct;
use super::tile;
use ferrum_types::{Dtype, PagedKvShape};

/// How a kernel works.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// Each warp makes its products; one tile of keys or of values is being loaded.
    Warp,
    /// Each warp has rows, keys and values of its own, in registers.
    Decode,
    /// Four warps make a product together (`wgmma`).
    Group,
}

/// A kernel's tiles, as the last lines of its file have them.
pub(super) struct Tiles {
    /// Warps along the rows, and warps that share them.
    pub(super) warps: [usize; 2],
    /// Keys.
    pub(super) keys: usize,
    /// Most elements of a value.
    pub(super) widest: usize,
    /// Blocks of a multiprocessor at once, about.
    pub(super) resident: usize,
    /// How keys and values come, and who makes products.
    pub(super) form: Form,
    /// The kernels, in the order of [`Stored`].
    pub(super) names: [&'static str; 5],
}

impl Tiles {
    pub(super) const fn rows(&self) -> usize {
        match self.form {
            Form::Decode => 8,
            Form::Warp | Form::Group => self.warps[0] * 16,
        }
    }

    /// Tiles of keys that a part has at least, or joining costs more than it gives: LEAST of `take_split`.
    pub(super) const fn least(&self) -> usize {
        match self.form {
            Form::Decode => 1,
            Form::Warp | Form::Group => 2,
        }
    }
}

macro_rules! names {
    ($form:literal, $tiles:literal) => {
        [
            concat!($form, "_f32_", $tiles),
            concat!($form, "_f16_", $tiles),
            concat!($form, "_bf16_", $tiles),
            concat!($form, "_fp8_", $tiles),
            concat!($form, "_int8_", $tiles),
        ]
    };
}

/// Tiles of many rows and of few, for one width of values.
pub(super) type Pair = [Tiles; 2];

pub(super) static NARROW: Pair = [
    of_warps([4, 1], [64, 128], 3, names!("flash", "64x128")),
    of_warps([1, 4], [64, 128], 4, names!("flash", "16x128")),
];

pub(super) static WIDE: Pair = [
    of_warps([4, 2], [32, 256], 1, names!("flash", "64x256")),
    of_warps([1, 4], [32, 256], 3, names!("flash", "16x256")),
];

pub(super) static WIDEST: Pair = [
    of_warps([2, 4], [32, 512], 1, names!("flash", "32x512")),
    of_warps([1, 4], [32, 512], 2, names!("flash", "16x512")),
];

pub(super) static LATENT: Pair = [
    of_warps([4, 2], [32, 512], 1, names!("latent", "64x512")),
    of_warps([1, 4], [32, 512], 2, names!("latent", "16x512")),
];

const fn of_warps(
    warps: [usize; 2],
    [keys, widest]: [usize; 2],
    resident: usize,
    names: [&'static str; 5],
) -> Tiles {
    Tiles {
        warps,
        keys,
        widest,
        resident,
        form: Form::Warp,
        names,
    }
}

/// Devices from here on have less shared memory than tiles of 64 latent rows of 512 take: `LATENT_KERNEL` of `kernels/flash.cuh`.
const WITHOUT_MANY_LATENT: (i32, i32) = (12, 0);

/// The compute capability that has `wgmma`.
pub(super) const WITH_GROUPS: (i32, i32) = (9, 0);

/// Tiles of many rows whose products four warps make together, for vectors of 128 and of 64 elements.
pub(super) static GROUP: [Tiles; 2] = [
    of_group(128, names!("flash_group", "128x128")),
    of_group(64, names!("flash_group", "128x64")),
];

const fn of_group(width: usize, names: [&'static str; 5]) -> Tiles {
    Tiles {
        warps: [8, 1],
        keys: 128,
        widest: width,
        resident: 1,
        form: Form::Group,
        names,
    }
}

/// Tiles of few rows whose warps do not wait for one another, for vectors of 128 and of 64 elements of 16 bits.
pub(super) static DECODE: [Tiles; 2] = [
    of_decode(128, names!("flash_decode", "128")),
    of_decode(64, names!("flash_decode", "64")),
];

const fn of_decode(width: usize, names: [&'static str; 5]) -> Tiles {
    Tiles {
        warps: [1, 4],
        keys: 64,
        widest: width,
        resident: 3,
        form: Form::Decode,
        names,
    }
}

/// What elements of a cache are, by what a kernel has to do with them.
#[derive(Clone, Copy)]
pub(super) struct Stored {
    /// Its place in [`Tiles::names`].
    pub(super) number: usize,
    files: [KernelFile; 3],
    pub(super) bytes: usize,
    /// Whether a tile holds them as they are.
    pub(super) direct: bool,
    pub(super) scaled: bool,
    /// Whether tiles have queries divided, each row by a factor of its own: those of bf16 as f16.
    pub(super) divides: bool,
}

impl Stored {
    /// None for what no cache has, and for activations that tensor cores do not take.
    pub(super) fn of<A: CudaAct>(dtype: Dtype) -> Option<Self> {
        if !tile::is_for::<A>() {
            return None;
        }
        use KernelFile as File;
        let (number, files) = match dtype {
            Dtype::F32 => (0, [File::FlashF32, File::FlashWideF32, File::Flash512F32]),
            Dtype::F16 => (1, [File::FlashF16, File::FlashWideF16, File::Flash512F16]),
            Dtype::BF16 => (
                2,
                [File::FlashBf16, File::FlashWideBf16, File::Flash512Bf16],
            ),
            Dtype::F8E4M3 => (3, [File::FlashFp8, File::FlashWideFp8, File::Flash512Fp8]),
            Dtype::I8 => (
                4,
                [File::FlashInt8, File::FlashWideInt8, File::Flash512Int8],
            ),
            _ => return None,
        };
        Some(Self {
            number,
            files,
            bytes: dtype.size(),
            direct: matches!(dtype, Dtype::F16 | Dtype::BF16),
            scaled: dtype == Dtype::I8,
            divides: dtype == Dtype::F16 && A::DTYPE == Dtype::BF16,
        })
    }

    /// Elements that are copied at once: a vector has a multiple of them.
    pub(super) fn unit(&self) -> usize {
        if self.bytes == 1 { 16 } else { 8 }
    }

    /// Where the kernels of some tiles are.
    pub(super) fn file(&self, tiles: &Tiles) -> KernelFile {
        let half = self.number == 1;
        match tiles.form {
            Form::Group if half => KernelFile::FlashGroupF16,
            Form::Group => KernelFile::FlashGroupBf16,
            Form::Decode if half => KernelFile::FlashDecodeF16,
            Form::Decode => KernelFile::FlashDecodeBf16,
            Form::Warp if tiles.widest <= NARROW[0].widest => self.files[0],
            Form::Warp if tiles.widest <= WIDE[0].widest => self.files[1],
            Form::Warp => self.files[2],
        }
    }

    /// Tiles of many rows and of few for vectors of these widths.
    pub(super) fn tiles(&self, widths: &Widths) -> Option<&'static Pair> {
        let &Widths {
            head_dim,
            value_dim,
            latent,
        } = widths;
        let unit = self.unit();
        let pairs: &[&Pair] = match latent {
            true => &[&LATENT],
            false => &[&NARROW, &WIDE, &WIDEST],
        };
        let fits = head_dim > 0
            && value_dim > 0
            && head_dim.is_multiple_of(unit)
            // Values of latent rows are cut when they are written.
            && value_dim.is_multiple_of(if latent { 8 } else { unit });
        let found = pairs.iter().find(|pair| value_dim <= pair[0].widest);
        found.copied().filter(|_| fits)
    }

    /// Whether a device of this compute capability has the kernel of these tiles of many rows.
    pub(super) fn has_many(&self, tiles: &Tiles, capability: (i32, i32)) -> bool {
        let is_latent = std::ptr::eq(tiles, &LATENT[0]);
        !is_latent || (self.direct && capability < WITHOUT_MANY_LATENT)
    }

    /// Those of some tiles that have the width of keys and values, whose elements they take as they are.
    pub(super) fn of_width(
        &self,
        widths: &Widths,
        tiles: &'static [Tiles],
    ) -> Option<&'static Tiles> {
        let &Widths {
            head_dim,
            value_dim,
            latent,
        } = widths;
        let suits = !latent && self.direct && head_dim == value_dim;
        let found = tiles.iter().find(|tiles| tiles.widest == head_dim);
        found.filter(|_| suits)
    }
}

/// What vectors of a cache are, as far as it decides about tiles.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    /// Elements of a key.
    pub(super) head_dim: usize,
    /// Elements of a value.
    pub(super) value_dim: usize,
    /// Whether values are the first elements of keys.
    pub(super) latent: bool,
}

/// Begins to load all kernels that attention over a paged cache of this shape may ask for.
pub(super) fn prepare<A: CudaAct>(device: &CudaBackend<A>, dtype: Dtype, shape: &PagedKvShape) {
    let Some(stored) = Stored::of::<A>(dtype) else {
        return;
    };
    let widths = Widths {
        head_dim: shape.head_dim,
        value_dim: shape.value_dim,
        latent: shape.values_in_keys,
    };
    let pair = stored.tiles(&widths).into_iter().flatten();
    let group = (device.shared.capability == WITH_GROUPS).then_some(&GROUP);
    let of_width = group.into_iter().chain([&DECODE]);
    let of_width = of_width.filter_map(|tiles| stored.of_width(&widths, tiles));
    let of_width = of_width.filter(|_| !device.batch_invariant());
    let files: Vec<_> = pair
        .chain(of_width)
        .map(|tiles| stored.file(tiles))
        .collect();
    device.shared.prepare(&files);
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};
    use std::collections::HashSet;

    /// Compiled for each architecture: a kernel for each line.
    const COMPILED: &str = include_str!("../../tests/cuda_resources.txt");

    fn check<A: CudaAct>(activations: &str) {
        let dtypes = [
            Dtype::F32,
            Dtype::F16,
            Dtype::BF16,
            Dtype::F8E4M3,
            Dtype::I8,
        ];
        for (architecture, capability) in [
            ("sm_80", (8, 0)),
            ("sm_89", (8, 9)),
            ("sm_90a", (9, 0)),
            ("sm_120a", (12, 0)),
        ] {
            let compiled = COMPILED.lines().filter_map(|line| {
                let words: Vec<_> = line.split_whitespace().collect();
                let is_here = words.get(2..4) == Some(&[activations, architecture]);
                is_here.then(|| words[1])
            });
            let compiled: HashSet<_> = compiled.collect();
            for stored in dtypes.map(|dtype| Stored::of::<A>(dtype).expect("a cache has kernels")) {
                let pairs = [&NARROW, &WIDE, &WIDEST, &LATENT];
                let many = pairs.map(|pair| &pair[0]).into_iter();
                let many = many.filter(|tiles| stored.has_many(tiles, capability));
                let direct = DECODE.iter().filter(|_| stored.direct);
                let group = GROUP
                    .iter()
                    .filter(|_| stored.direct && capability == WITH_GROUPS);
                let few = pairs.map(|pair| &pair[1]);
                for tiles in many.chain(few).chain(direct).chain(group) {
                    let name = tiles.names[stored.number];
                    assert!(compiled.contains(name), "{name} for {architecture}");
                }
            }
        }
    }

    /// A kernel that the host asks for and that is not there would fail the request.
    #[test]
    fn each_architecture_has_the_kernels_that_are_asked_for() {
        check::<bf16>("bf16");
        check::<f16>("f16");
    }
}
