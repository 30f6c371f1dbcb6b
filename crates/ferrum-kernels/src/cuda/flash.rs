//! Attention on tensor cores: which kernel of `kernels/flash.cuh`, `kernels/flash_group.cuh` and `kernels/flash_decode.cuh` runs,
//! over which tiles and parts of the keys.
//!
//! A batch may have prompts, chunks and decodes at once, and the host knows bounds only. Sequences with few rows (a row is a
//! query of a head that shares a kv head with others) go to kernels with tiles of 16 rows, whose warps share the keys; those
//! with more to tiles of 64 (of 32 where values are wider than 256). Each launch leaves out the sequences of the other, so a captured step can be replayed with other
//! lengths. Compute capability 9.0 has tiles of 128 rows for sequences with many, whose products four warps make together
//! (warpgroup MMA, `wgmma`). Few rows that leave the device room for more blocks, as those of one decode, have tiles of 8, whose warps do not
//! wait for one another.
//!
//! Where there are less tiles than the device has room for, blocks share the keys of a tile, and each writes a part of the result.
//! The last block of a tile to do so joins the parts, if they are few bytes ([`MAX_JOINED`]), as those of decodes are: that saves a
//! launch. More bytes would keep one block busy for longer than the launch of `flash_combine` takes, which has a warp for each row.
//!
//! **Order of sums.** All kernels of `flash.cuh` give a row the same bits as long as its keys are parted alike. By
//! default, parts are as many as the device has room for, which depends on the batch; with `batch_invariant` they are [`PART`] keys each, in every launch.

use super::attention_call::Call;
use super::compiler::KernelFile;
use super::context::{Arg, COUNTERS, CudaContext};
use super::flash_tiles::{DECODE, Form, GROUP, Stored, Tiles, WITH_GROUPS, Widths};
use super::role::CudaAct;
use crate::backend::AttnConfig;
use crate::backend::check::elements;
use ferrum_types::{Dtype, Result};

/// Keys of a part where bits are not to depend on the batch: a multiple of all tiles' keys.
const PART: usize = 512;

/// Most rows of a sequence that goes to tiles of 16, in batches that have longer ones.
const FEW_ROWS: usize = 32;

/// Most parts of a row: joining them reads all.
const MAX_PARTS: usize = 32;

/// Most bytes for the parts of a launch where bits are not to depend on the batch; above, a block makes all parts of a row.
const MAX_BYTES: usize = 128 << 20;

/// Most bytes of parts that the last block of a tile joins. By estimate, a block reads 40 bytes a nanosecond (16 KiB at once, each
/// time 0.4 µs), so these take 3 µs, and `flash_combine` was measured at 7.
const MAX_JOINED: usize = 128 << 10;

/// NMSE between a row's results where its keys are parted in two ways: weights are rounded to 16 bits against another maximum.
pub(super) const ROW_TOLERANCE: f64 = 1e-4;

/// No sequence has as many rows.
const NO_LIMIT: usize = i32::MAX as usize;

/// Most rows of a sequence in batches that do not go to tiles of 128: half of such a tile would have none.
const SOME_ROWS: usize = 64;

/// Where keys and values lie, and what the host knows of their lengths.
pub(super) struct Cache {
    pub(super) dtype: Dtype,
    /// Values are the first elements of keys.
    pub(super) latent: bool,
    pub(super) k: Arg,
    pub(super) v: Arg,
    /// Of keys and of values.
    pub(super) scales: [Arg; 2],
    pub(super) place: Place,
    /// At least the longest sequence of keys.
    pub(super) max_keys: usize,
}

/// The layout of a cache.
pub(super) enum Place {
    /// One sequence.
    Contiguous {
        /// Keys from one kv head to the next.
        head_keys: usize,
        /// Key index of the first query.
        first_index: usize,
    },
    /// Sequences in blocks.
    Paged {
        /// `query_starts`, `kv_lens`, the block tables, the number of sequences, and the length of a table.
        batch: [Arg; 5],
        seqs: usize,
        max_queries: usize,
        block_size: usize,
    },
}

/// One launch: which rows it takes, in which tiles and parts.
struct Launch {
    tiles: &'static Tiles,
    /// Tiles of all sequences and one kv head.
    count: usize,
    /// Tiles for each sequence; 0: as many as its rows take.
    row_tiles: usize,
    /// Fewest and most rows of its sequences.
    rows: [usize; 2],
    /// Blocks that share a tile.
    splits: usize,
    /// Tokens whose parts are kept, and how many of them a sequence has; 0: those of the batch.
    slots: [usize; 2],
}

/// What a call asks for.
struct Job<'a> {
    op: &'static str,
    call: &'a Call,
    cache: &'a Cache,
    stored: Stored,
    /// `out`, `q` and `sinks`.
    buffers: [Arg; 3],
    invariant: bool,
    /// Bytes of shared memory of a block, at most.
    max_shared: usize,
}

impl Job<'_> {
    fn config(&self) -> &AttnConfig {
        &self.call.config
    }

    fn group(&self) -> usize {
        self.config().heads / self.config().kv_heads
    }

    fn widths(&self) -> Widths {
        let config = self.config();
        Widths {
            head_dim: config.head_dim,
            value_dim: config.value_dim,
            latent: self.cache.latent,
        }
    }

    /// Those of some tiles that have the width of keys and values. Their order of sums is another, so no batch may decide where bits are
    /// not to depend on it.
    fn of_width(&self, tiles: &'static [Tiles]) -> Option<&'static Tiles> {
        let found = self.stored.of_width(&self.widths(), tiles);
        found.filter(|_| !self.invariant)
    }

    /// Tiles whose products four warps make together, where this device has the instruction and sequences have rows for them.
    fn group_tiles(&self, capability: (i32, i32)) -> Option<&'static Tiles> {
        let suits = capability == WITH_GROUPS && self.max_queries() * self.group() > SOME_ROWS;
        self.of_width(&GROUP).filter(|_| suits)
    }

    /// Bytes of shared memory of a block, in the order of the kernel.
    fn shared_bytes(&self, tiles: &Tiles) -> usize {
        let (config, stored) = (self.config(), &self.stored);
        if tiles.form == Form::Decode {
            return 0;
        }
        if tiles.form == Form::Group {
            // Queries, two tiles of keys and of values, where those of four tiles lie, and factors of queries.
            let vectors = tiles.rows() + 4 * tiles.keys;
            return vectors * tiles.widest * 2 + 4 * tiles.keys * 4 + tiles.rows() * 4;
        }
        let width = |dim: usize| dim.next_multiple_of(16);
        let row = |dim: usize| (width(dim) + 8) * 2;
        let (rows, keys, [along, across]) = (tiles.rows(), tiles.keys, tiles.warps);
        let (key_dim, value_dim) = (config.head_dim, config.value_dim);
        let if_true = |flag: bool, bytes: usize| if flag { bytes } else { 0 };
        let widest = match self.cache.latent {
            true => key_dim,
            false => key_dim.max(value_dim),
        };
        let second = match self.cache.latent {
            true => if_true(stored.direct, keys * row(key_dim)),
            false => keys * row(value_dim),
        };
        2 * keys * 8
            + if_true(stored.scaled, 4 * keys * 4)
            + if_true(stored.divides, rows * 4)
            + if_true(across > 1, across * rows * 4)
            + along * across * 32 * 4
            + (rows + keys) * row(key_dim)
            + second
            + if_true(across > 1, rows * (keys + 8) * 2)
            + if_true(!stored.direct, keys * width(widest) * stored.bytes)
    }

    /// Most keys that a row sees.
    fn max_keys(&self) -> usize {
        self.cache.max_keys.max(1)
    }

    /// Blocks that share the keys of each of `blocks` tiles, of which the device has room for `room`.
    fn splits(&self, tiles: &Tiles, blocks: usize, room: usize) -> usize {
        let keys = match self.config().sliding_window {
            Some(window) if self.config().causal => {
                let most = window.saturating_add(tiles.rows());
                self.max_keys().min(most)
            }
            _ => self.max_keys(),
        };
        let most = keys.div_ceil(tiles.keys * tiles.least()).min(MAX_PARTS);
        (room / blocks.max(1)).clamp(1, most)
    }

    /// Blocks that share the keys of a tile where parts are of one length: all parts, or one block for all.
    fn parts(&self, launch: &Launch) -> usize {
        let parts = self.max_keys().div_ceil(PART);
        let bytes = self.bytes_of_parts(launch, parts);
        if bytes.is_ok_and(|bytes| bytes <= MAX_BYTES) {
            parts
        } else {
            1
        }
    }

    /// The launches of this call with some tiles of many rows and of few, each block with all keys.
    fn plan(&self, [many, few]: [&'static Tiles; 2]) -> Vec<Launch> {
        let group = self.group();
        let all = |tiles: &'static Tiles, rows: [usize; 2]| {
            let tokens = self.call.tokens;
            let (count, row_tiles) = match self.cache.place {
                Place::Contiguous { .. } => ((tokens * group).div_ceil(tiles.rows()), 0),
                Place::Paged {
                    seqs, max_queries, ..
                } => {
                    // Room for any lengths, or for the longest of each sequence.
                    let any = tokens * group / tiles.rows() + seqs;
                    let each = (max_queries * group).div_ceil(tiles.rows());
                    match seqs.saturating_mul(each) {
                        equal if equal <= any => (equal, each),
                        _ => (any, 0),
                    }
                }
            };
            Launch {
                tiles,
                count,
                row_tiles,
                rows,
                splits: 1,
                slots: [tokens, 0],
            }
        };
        let no_limit = [0, NO_LIMIT];
        match self.cache.place {
            Place::Contiguous { .. } if self.call.tokens * group <= FEW_ROWS => {
                vec![all(few, no_limit)]
            }
            Place::Contiguous { .. } => vec![all(many, no_limit)],
            Place::Paged { max_queries, .. } if max_queries * group <= FEW_ROWS => {
                vec![all(few, no_limit)]
            }
            // One sequence, or none that has few rows.
            Place::Paged { seqs, .. } if seqs == 1 || group > FEW_ROWS => {
                vec![all(many, no_limit)]
            }
            Place::Paged { seqs, .. } => {
                let row_tiles = FEW_ROWS / few.rows();
                let each = FEW_ROWS / group;
                let short = Launch {
                    count: seqs * row_tiles,
                    row_tiles,
                    slots: [seqs * each, each],
                    ..all(few, [0, FEW_ROWS])
                };
                vec![all(many, [FEW_ROWS + 1, NO_LIMIT]), short]
            }
        }
    }

    /// The launches of this call on a device with so many multiprocessors.
    fn launches(&self, tiles: [&'static Tiles; 2], processors: usize) -> Vec<Launch> {
        let mut launches = self.plan(tiles);
        let blocks = |launch: &Launch| launch.count * self.config().kv_heads;
        let room = |launch: &Launch| processors * launch.tiles.resident;
        if let Some(decode) = self.of_width(&DECODE) {
            let others = self.plan([tiles[0], decode]);
            for (launch, other) in launches.iter_mut().zip(others) {
                if std::ptr::eq(other.tiles, decode) && blocks(&other) < room(&other) {
                    *launch = other;
                }
            }
        }
        for launch in &mut launches {
            let (blocks, room) = (blocks(launch), room(launch));
            launch.splits = match self.invariant {
                true if blocks < room => self.parts(launch),
                true => 1,
                false => self.splits(launch.tiles, blocks, room),
            };
        }
        launches
    }

    /// Bytes for sums of values, maxima and totals of so many parts.
    fn bytes_of_parts(&self, launch: &Launch, parts: usize) -> Result<usize> {
        let (config, [slots, _]) = (self.config(), launch.slots);
        let row = config.value_dim.saturating_add(2);
        elements(self.op, &[parts, slots, config.heads, row, 4])
    }

    /// Bytes that a launch needs beside its result.
    fn scratch_bytes(&self, launch: &Launch) -> Result<usize> {
        let kept = self.invariant && self.max_keys() > PART;
        match launch.splits {
            1 if !kept => Ok(0),
            splits => self.bytes_of_parts(launch, splits),
        }
    }

    /// Most queries of a sequence.
    fn max_queries(&self) -> usize {
        match self.cache.place {
            Place::Contiguous { .. } => self.call.tokens,
            Place::Paged { max_queries, .. } => max_queries,
        }
    }

    /// Whether the last block of a tile joins its parts, which only kernels with tiles of few rows can.
    fn joins(&self, launch: &Launch) -> bool {
        let config = self.config();
        let most = self.max_queries().saturating_mul(self.group());
        let rows = launch.tiles.rows().min(most);
        let bytes = elements(self.op, &[launch.splits, rows, config.value_dim, 4]);
        launch.splits > 1
            && launch.tiles.warps[0] == 1
            && launch.count * config.kv_heads <= COUNTERS
            && bytes.is_ok_and(|bytes| bytes <= MAX_JOINED)
    }

    fn run<A: CudaAct>(
        &self,
        ctx: &mut CudaContext<A>,
        launch: &Launch,
        partial: Arg,
    ) -> Result<()> {
        let config = self.config();
        let blocks = elements(self.op, &[launch.count, config.kv_heads, launch.splits])?;
        let [along, across] = launch.tiles.warps;
        let tiles = launch.tiles;
        let kernel = (self.stored.file(tiles), tiles.names[self.stored.number]);
        let threads = (along * across * 32) as u32;
        let grid = (blocks, threads, self.shared_bytes(launch.tiles));
        let joins = self.joins(launch);
        let counters = Arg::At(if joins { ctx.counters() } else { 0 });
        ctx.launch(self.op, kernel, grid, self.args(launch, partial, counters))?;
        if launch.splits > 1 && !joins {
            self.combine(ctx, launch, partial)?;
        }
        Ok(())
    }

    /// The parameters of the kernels, in the order of `FLASH_PARAMS`.
    fn args(&self, launch: &Launch, partial: Arg, counters: Arg) -> [Arg; 39] {
        let (cache, config) = (self.cache, self.config());
        // The parameters of a call that all kernels of attention have, in the order of `Call::args`.
        let call = self.call.args(self.buffers);
        let none = [Arg::At(0), Arg::At(0), Arg::At(0), Arg::Int(0), Arg::Int(0)];
        let (batch, block_size, head_keys, first_index) = match &cache.place {
            Place::Contiguous {
                head_keys,
                first_index,
            } => (none, 1, *head_keys, *first_index),
            Place::Paged {
                batch, block_size, ..
            } => (*batch, *block_size, 0, 0),
        };
        let part = if self.invariant { PART } else { 0 };
        let mut args = [counters; 39];
        args[..4].copy_from_slice(&[call[0], call[1], call[2], partial]);
        args[4..8].copy_from_slice(&[cache.k, cache.v, cache.scales[0], cache.scales[1]]);
        args[8..13].copy_from_slice(&batch);
        args[13..21].copy_from_slice(
            &[
                block_size,
                config.kv_heads,
                self.group(),
                config.head_dim,
                config.value_dim,
                self.call.tokens,
                cache.max_keys,
                first_index,
            ]
            .map(Arg::Int),
        );
        args[21] = Arg::Long(head_keys);
        args[22..31].copy_from_slice(&call[7..]);
        let [fewest, most] = launch.rows;
        let [slots, seq_slots] = launch.slots;
        args[31..38].copy_from_slice(
            &[
                launch.splits,
                part,
                launch.row_tiles,
                fewest,
                most,
                slots,
                seq_slots,
            ]
            .map(Arg::Int),
        );
        args
    }

    /// Joins the parts of a launch's rows.
    fn combine<A: CudaAct>(
        &self,
        ctx: &mut CudaContext<A>,
        launch: &Launch,
        partial: Arg,
    ) -> Result<()> {
        let (call, config) = (self.call, self.config());
        let [slots, seq_slots] = launch.slots;
        let (starts, seqs) = match &self.cache.place {
            Place::Contiguous { .. } => (Arg::At(0), 0),
            Place::Paged { batch, seqs, .. } => (batch[0], *seqs),
        };
        let args = [
            self.buffers[0],
            partial,
            self.buffers[2],
            starts,
            Arg::Int(config.heads),
            Arg::Int(self.group()),
            Arg::Int(config.value_dim),
            Arg::Long(call.out.token),
            Arg::Long(call.out.head),
            Arg::Int(launch.splits),
            Arg::Int(launch.rows[0]),
            Arg::Int(launch.rows[1]),
            Arg::Int(slots),
            Arg::Int(seq_slots),
            Arg::Int(seqs),
        ];
        let rows = elements(self.op, &[slots, config.heads])?;
        // A warp for each row.
        let grid = (rows.div_ceil(4), 128, 0);
        ctx.launch(
            self.op,
            (KernelFile::FlashCombine, "flash_combine"),
            grid,
            args,
        )
    }
}

/// Attention on tensor cores, of queries of 16 bits; false, and nothing is done, where no kernel is for these widths, or where
/// its tiles are more than the device's shared memory. `buffers` are `out`, `q` and `sinks`.
pub(super) fn attention<A: CudaAct>(
    ctx: &mut CudaContext<A>,
    op: &'static str,
    call: &Call,
    buffers: [Arg; 3],
    cache: &Cache,
) -> Result<bool> {
    let Some(stored) = Stored::of::<A>(cache.dtype) else {
        return Ok(false);
    };
    let job = Job {
        op,
        call,
        cache,
        stored,
        buffers,
        invariant: ctx.backend.batch_invariant(),
        max_shared: ctx.shared().max_shared,
    };
    let Some([many, few]) = stored.tiles(&job.widths()) else {
        return Ok(false);
    };
    let fits = |tiles: &&Tiles| job.shared_bytes(tiles) <= job.max_shared;
    let Some(few) = Some(few).filter(fits) else {
        return Ok(false);
    };
    // Tiles of few rows do for all where those of many are too large, or have no kernel.
    let capability = ctx.shared().capability;
    let many = Some(many)
        .filter(fits)
        .filter(|many| stored.has_many(many, capability))
        .unwrap_or(few);
    let group = job.group_tiles(capability).filter(fits);
    let many = group.unwrap_or(many);
    let launches = job.launches([many, few], ctx.backend.multiprocessors());
    let bytes = launches.iter().map(|launch| job.scratch_bytes(launch));
    let bytes = bytes.collect::<Result<Vec<_>>>()?;
    // Launches follow one another, so they may use the same memory.
    let partial = match bytes.into_iter().max().unwrap_or(0) {
        0 => Arg::At(0),
        bytes => Arg::At(ctx.scratch(bytes)?),
    };
    for launch in &launches {
        job.run(ctx, launch, partial)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::HeadLayout;
    use half::bf16;

    /// Kernels and parts of a batch of sequences with so many queries and keys at most, on 132 multiprocessors.
    fn launched(
        [heads, kv_heads, dim]: [usize; 3],
        [seqs, max_queries, max_keys]: [usize; 3],
        invariant: bool,
    ) -> Vec<(&'static str, usize)> {
        let config = AttnConfig {
            heads,
            kv_heads,
            head_dim: dim,
            value_dim: dim,
            scale: 1.0,
            causal: true,
            sliding_window: None,
            chunked: false,
            softcap: None,
        };
        let call = Call::of(HeadLayout::TokenMajor, seqs * max_queries, &config);
        let none = Arg::At(0);
        let cache = Cache {
            dtype: Dtype::F16,
            latent: false,
            k: none,
            v: none,
            scales: [none; 2],
            place: Place::Paged {
                batch: [none; 5],
                seqs,
                max_queries,
                block_size: 32,
            },
            max_keys,
        };
        let job = Job {
            op: "paged_attention",
            call: &call,
            cache: &cache,
            stored: Stored::of::<bf16>(cache.dtype).expect("a cache of f16 has kernels"),
            buffers: [none; 3],
            invariant,
            max_shared: 227 << 10,
        };
        let tiles = job
            .stored
            .tiles(&job.widths())
            .expect("these widths have tiles");
        let launches = job.launches([&tiles[0], &tiles[1]], 132);
        let named = launches.iter().map(|launch| {
            let name = launch.tiles.names[job.stored.number];
            (name, launch.splits)
        });
        named.collect()
    }

    /// One decode, some, and many; drafts; a prompt beside decodes; widths that the kernel does not have.
    #[test]
    fn few_rows_that_leave_room_have_tiles_of_eight() {
        let llama = [32, 8, 128];
        let few = "flash_decode_f16_128";
        for (heads, batch, invariant, expected) in [
            (llama, [1, 1, 1024], false, &[(few, 16)][..]),
            (llama, [1, 1, 8192], false, &[(few, 32)]),
            (llama, [32, 1, 1024], false, &[(few, 1)]),
            (llama, [64, 1, 1024], false, &[("flash_f16_16x128", 1)]),
            (llama, [1, 1, 1024], true, &[("flash_f16_16x128", 2)]),
            (llama, [1, 5, 1024], false, &[(few, 16)]),
            (
                llama,
                [4, 40, 1024],
                false,
                &[("flash_f16_64x128", 4), (few, 3)],
            ),
            (
                [32, 4, 64],
                [1, 1, 1024],
                false,
                &[("flash_decode_f16_64", 16)],
            ),
            ([32, 8, 96], [1, 1, 1024], false, &[("flash_f16_16x128", 8)]),
        ] {
            let found = launched(heads, batch, invariant);
            assert_eq!(found, expected, "{heads:?} {batch:?} {invariant}");
        }
    }
}
