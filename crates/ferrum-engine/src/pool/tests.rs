//! Random operations on a pool and on a model that is too simple to be wrong: for each block, the
//! tokens whose keys it would hold.

use super::*;
use proptest::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::hash::Hasher;

/// Hashes everything to one of two values.
#[derive(Clone, Default)]
struct Poor;

struct PoorHasher(u64);

impl BuildHasher for Poor {
    type Hasher = PoorHasher;

    fn build_hasher(&self) -> PoorHasher {
        PoorHasher(0)
    }
}

impl Hasher for PoorHasher {
    fn finish(&self) -> u64 {
        self.0 & 1
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 ^= bytes.iter().fold(0, |sum, &b| sum ^ u64::from(b));
    }
}

fn salt(tenant: u32) -> CacheSalt {
    CacheSalt {
        tenant: (tenant > 0).then(|| tenant.to_string().into()),
        ..CacheSalt::default()
    }
}

/// Blocks and windows of groups.
type Groups = &'static [(usize, Option<usize>)];

/// A sequence as the model sees it.
struct Seq {
    table: BlockTable,
    tenant: u32,
    tokens: Vec<TokenId>,
    /// Tokens that were written to the memory of the blocks.
    computed: usize,
}

/// What a cell of memory holds: the tenant and all tokens so far.
type Cell = (u32, Vec<TokenId>);

/// A pool, and what the memory of its blocks holds, by group.
struct Model<S> {
    pool: BlockPool<S>,
    windows: Vec<Option<usize>>,
    cells: Vec<Vec<Cell>>,
    seqs: Vec<Seq>,
    hits: usize,
}

impl<S: BuildHasher> Model<S> {
    fn new(groups: &[(usize, Option<usize>)], block_size: usize, hasher: S) -> Self {
        let cells = groups
            .iter()
            .map(|(n, _)| vec![(0, Vec::new()); n * block_size]);
        Self {
            pool: BlockPool::with_hasher(groups, block_size, hasher),
            windows: groups.iter().map(|group| group.1).collect(),
            cells: cells.collect(),
            seqs: Vec::new(),
            hits: 0,
        }
    }

    fn cell(&mut self, group: usize, block: BlockId, at: usize) -> &mut Cell {
        let size = self.pool.block_size();
        &mut self.cells[group][block.0 as usize * size + at % size]
    }

    /// What the token at `position` sees in memory is what its sequence wrote.
    fn check_seen(&mut self, table: &BlockTable, tenant: u32, tokens: &[TokenId], position: usize) {
        for group in 0..self.windows.len() {
            let first = self.windows[group].map_or(0, |w| (position + 1).saturating_sub(w));
            for at in first..position {
                let block = table.group(group)[at / self.pool.block_size()];
                let expected = (tenant, tokens[..=at].to_vec());
                assert_eq!(*self.cell(group, block, at), expected);
            }
        }
    }

    /// A new sequence takes what the cache has, and must find in memory what it would have written.
    fn start(&mut self, tenant: u32, tokens: Vec<TokenId>) {
        let most = tokens.len().saturating_sub(1) / self.pool.block_size();
        let table = self.pool.match_prefix(&salt(tenant), &tokens, most);
        let computed = table.len() * self.pool.block_size();
        assert!(computed < tokens.len().max(1));
        self.check_seen(&table, tenant, &tokens, computed);
        self.hits += computed;
        self.seqs.push(Seq {
            table,
            tenant,
            tokens,
            computed,
        });
    }

    /// Computes some more tokens of a sequence, if there are blocks for them.
    fn run(&mut self, index: usize, tokens: usize) {
        let mut seq = self.seqs.swap_remove(index);
        let end = (seq.computed + tokens).min(seq.tokens.len());
        let (available, had) = (self.pool.available(), seq.table.len());
        let size = self.pool.block_size();
        if self.pool.grow_to(&mut seq.table, seq.tokens.len(), end) {
            self.check_seen(&seq.table, seq.tenant, &seq.tokens, seq.computed);
            for (group, at) in
                (0..self.windows.len()).flat_map(|g| (seq.computed..end).map(move |at| (g, at)))
            {
                let block = seq.table.group(group)[at / size];
                *self.cell(group, block, at) = (seq.tenant, seq.tokens[..=at].to_vec());
            }
            seq.computed = end;
            let computed = &seq.tokens[..end];
            let (salt, mut replaced) = (salt(seq.tenant), BlockTable::default());
            self.pool
                .register(&mut seq.table, &salt, computed, &mut replaced);
            self.pool.release(&mut replaced);
            self.pool.release_before_window(&mut seq.table, end);
            for (group, window) in self.windows.iter().enumerate() {
                // The window of the next token, and what the tokens after it have in the same block.
                let most = window.map_or(usize::MAX, |w| spanned_blocks(w, size));
                assert!(seq.table.held(group) <= most);
            }
        } else {
            assert_eq!(self.pool.available(), available);
            assert_eq!(seq.table.len(), had);
        }
        self.seqs.push(seq);
    }

    fn stop(&mut self, index: usize) {
        let mut seq = self.seqs.swap_remove(index);
        self.pool.release(&mut seq.table);
        assert!(seq.table.is_empty());
    }

    fn check(&self) {
        self.pool.check(self.seqs.iter().map(|s| &s.table)).unwrap();
        assert!(self.pool.used() <= self.pool.blocks());
    }

    /// One operation, chosen by `dice`.
    fn operate(&mut self, mut dice: impl FnMut(u32) -> u32) {
        let some = |dice: &mut dyn FnMut(u32) -> u32, n: usize| dice(n as u32) as usize;
        match (dice(8), self.seqs.len()) {
            (0..=1, 0..8) | (_, 0) => {
                // Few tenants and few different tokens, so that prefixes meet.
                let (tenant, len) = (dice(3), 1 + dice(14));
                let tokens = (0..len).map(|_| dice(8) / 7).collect();
                self.start(tenant, tokens);
            }
            (2..=4, n) => {
                let (index, tokens) = (some(&mut dice, n), 1 + some(&mut dice, 5));
                self.run(index, tokens);
            }
            (5, n) => {
                let index = some(&mut dice, n);
                self.seqs[index].tokens.push(dice(2));
            }
            (7, _) if dice(200) == 0 => self.pool.clear_cache(),
            (_, n) => self.stop(some(&mut dice, n)),
        }
    }
}

fn drive<S: BuildHasher>(mut model: Model<S>, seed: u64, steps: usize) -> usize {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for step in 0..steps {
        model.operate(|n| ((u64::from(rng.next_u32()) * u64::from(n)) >> 32) as u32);
        if step % 16 == 0 {
            model.check();
        }
    }
    while !model.seqs.is_empty() {
        model.stop(0);
    }
    model.check();
    assert_eq!(model.pool.used(), 0);
    assert_eq!(model.pool.cache.len() > 0, model.pool.cached() > 0);
    model.pool.clear_cache();
    assert_eq!((model.pool.cached(), model.pool.cache.len()), (0, 0));
    model.check();
    model.hits
}

#[test]
fn two_million_operations_lose_and_mix_up_nothing() {
    for (seed, blocks, block_size) in [(1, 12, 2), (2, 40, 1), (3, 7, 4), (4, 24, 3)] {
        let model = Model::new(&[(blocks, None)], block_size, RandomState::new());
        let hits = drive(model, seed, 500_000);
        assert!(hits > 1000, "the cache was hardly used: {hits}");
    }
    // Hashes that collide all the time make misses, never a wrong hit.
    drive(Model::new(&[(16, None)], 2, Poor), 5, 60_000);
}

#[test]
fn groups_with_windows_lose_and_mix_up_nothing() {
    let shapes: [(Groups, usize); 5] = [
        (&[(12, None), (9, Some(3))], 2),
        (&[(40, None), (12, Some(5)), (20, Some(9))], 1),
        (&[(7, Some(4))], 4),
        (&[(14, Some(1)), (24, Some(6))], 3),
        (&[(16, None), (16, Some(2))], 2),
    ];
    for ((groups, block_size), seed) in shapes.into_iter().zip(10..) {
        let model = Model::new(groups, block_size, RandomState::new());
        let hits = drive(model, seed, 200_000);
        assert!(hits > 1000, "the cache was hardly used: {hits}");
        drive(Model::new(groups, block_size, Poor), seed, 20_000);
    }
}

proptest! {
    #[test]
    fn operations_keep_the_books_in_order(
        blocks in 1usize..12,
        block_size in 1usize..5,
        (windowed, window, kinds) in (1usize..12, 1usize..9, 0..3),
        dice in prop::collection::vec(any::<u32>(), 0..200),
    ) {
        let groups = [(blocks, None), (windowed, Some(window))];
        let groups = &groups[usize::from(kinds == 0)..][..1 + usize::from(kinds == 2)];
        let mut model = Model::new(groups, block_size, RandomState::new());
        let mut rest = dice.into_iter();
        while rest.len() > 0 {
            model.operate(|n| rest.next().unwrap_or(0) % n);
            model.check();
        }
    }
}

fn computed(pool: &mut BlockPool, salt: &CacheSalt, tokens: &[TokenId]) -> BlockTable {
    let mut table = BlockTable::default();
    assert!(pool.grow(&mut table, tokens.len()));
    let mut replaced = BlockTable::default();
    pool.register(&mut table, salt, tokens, &mut replaced);
    pool.release(&mut replaced);
    table
}

#[test]
fn only_whole_equal_prefixes_of_one_tenant_match() {
    let mut pool = BlockPool::new(8, 2);
    let table = computed(&mut pool, &salt(1), &[1, 2, 3, 4, 5]);
    let cases: &[(u32, &[TokenId], usize)] = &[
        (1, &[1, 2, 3, 4, 5], 2),
        (1, &[1, 2, 3, 4], 2),
        (1, &[1, 2, 3, 9], 1),
        (1, &[1, 2, 3], 1),
        (1, &[1], 0),
        (1, &[3, 4], 0),
        (2, &[1, 2, 3, 4, 5], 0),
        (0, &[1, 2, 3, 4, 5], 0),
    ];
    for &(tenant, tokens, blocks) in cases {
        let mut found = pool.match_prefix(&salt(tenant), tokens, usize::MAX);
        assert_eq!(
            found.blocks(),
            &table.blocks()[..blocks],
            "{tenant} {tokens:?}"
        );
        pool.check([&table, &found]).unwrap();
        pool.release(&mut found);
    }
    let other = CacheSalt {
        prompt_len: Some(5),
        ..salt(1)
    };
    assert!(pool.match_prefix(&other, &[1, 2], 9).blocks().is_empty());
}

#[test]
fn the_least_recently_used_leaves_first_and_from_its_end() {
    let mut pool = BlockPool::new(4, 1);
    let none = CacheSalt::default();
    let mut old = computed(&mut pool, &none, &[1, 2]);
    let mut new = computed(&mut pool, &none, &[3, 4]);
    pool.release(&mut old);
    pool.release(&mut new);
    // A look makes the older one the newer.
    let mut looked = pool.match_prefix(&none, &[1, 2], 9);
    pool.release(&mut looked);
    let mut taken = BlockTable::default();
    assert!(pool.grow(&mut taken, 1));
    let held = |pool: &mut BlockPool, tokens: &[TokenId]| {
        let mut table = pool.match_prefix(&none, tokens, 9);
        let blocks = table.blocks().len();
        pool.release(&mut table);
        blocks
    };
    assert_eq!(held(&mut pool, &[3, 4]), 1, "its end is gone");
    assert_eq!(held(&mut pool, &[1, 2]), 2);
    pool.check([&taken]).unwrap();
}

#[test]
fn equal_blocks_become_one() {
    let mut pool = BlockPool::new(8, 2);
    let none = CacheSalt::default();
    let first = computed(&mut pool, &none, &[1, 2, 3]);
    let second = computed(&mut pool, &none, &[1, 2, 4]);
    assert_eq!(first.blocks()[0], second.blocks()[0]);
    assert_ne!(first.blocks()[1], second.blocks()[1]);
    assert_eq!(pool.used(), 3);
    pool.check([&first, &second]).unwrap();
}

#[test]
fn the_check_sees_what_is_wrong() {
    let none = CacheSalt::default();
    type Damage = fn(&mut BlockPool, &mut BlockTable);
    let broken: [(&str, Damage); 6] = [
        ("references", |_, table| table.groups[0].blocks.truncate(1)),
        ("lost", |pool, _| pool.groups[0].free.truncate(1)),
        ("listed twice", |pool, _| {
            pool.groups[0].free.push(BlockId(3))
        }),
        ("listed and used", |pool, _| {
            pool.groups[0].free.push(BlockId(0))
        }),
        ("is cached", |pool, table| {
            let block = table.groups[0].blocks[0];
            pool.groups[0].set_node(block, None);
        }),
        ("users", |pool, table| pool.cache.hold(table.tip.unwrap())),
    ];
    for (words, damage) in broken {
        let mut pool = BlockPool::new(4, 2);
        let mut table = computed(&mut pool, &none, &[1, 2, 3]);
        pool.check([&table]).unwrap();
        damage(&mut pool, &mut table);
        let fault = pool.check([&table]).unwrap_err().to_string();
        assert!(fault.contains(words), "{fault}, expected {words}");
    }
}

#[test]
fn what_is_evicted_is_told_with_its_whole_prefix() {
    let mut pool = BlockPool::new(4, 2);
    let mut first = computed(&mut pool, &salt(1), &[1, 2, 3, 4]);
    pool.release(&mut first);
    let mut other = BlockTable::default();
    assert!(pool.grow(&mut other, 6));
    assert_eq!(pool.take_evicted(), [], "nobody asked for it");
    pool.release(&mut other);
    pool.record_evictions();
    let mut table = computed(&mut pool, &salt(2), &[5, 6]);
    let cached: Vec<_> = pool.cached_prefixes();
    let tokens: Vec<_> = cached.iter().map(|prefix| prefix.tokens.clone()).collect();
    // Used ones first, and a block before those that continue it.
    assert_eq!(tokens, [vec![5, 6], vec![1, 2]]);
    assert!(pool.grow(&mut table, 8));
    let evicted = pool.take_evicted();
    assert_eq!(evicted.len(), 1);
    assert_eq!(
        (&evicted[0].salt, &evicted[0].tokens[..]),
        (&salt(1), &[1, 2][..])
    );
    assert_eq!(pool.take_evicted(), []);
    pool.check([&table]).unwrap();
}

#[test]
fn blocks_of_windows_are_told_with_those_that_they_need() {
    let groups = [(4, None), (4, Some(3))];
    let mut pool = BlockPool::with_hasher(&groups, 2, RandomState::new());
    pool.record_evictions();
    let mut table = computed(&mut pool, &salt(1), &[1, 2, 3, 4]);
    pool.release(&mut table);
    let all = pool.cached_prefixes();
    let kinds = all
        .iter()
        .map(|prefix| (prefix.entry.kind(), prefix.tokens.len()));
    let expected = [(0, 2), (0, 4), (1, 2), (1, 4)].map(|(g, n)| (CacheEntryKind::Block(g), n));
    assert_eq!(kinds.collect::<Vec<_>>(), expected);
    // Three of four blocks of the first group: the block of the window goes with the one that it needs.
    assert!(pool.grow_to(&mut table, 6, 1));
    let mut evicted = pool.take_evicted();
    evicted.sort_by_key(|prefix| prefix.entry.kind());
    let kinds = evicted
        .iter()
        .map(|prefix| (prefix.entry.kind(), prefix.tokens.len()));
    assert_eq!(
        kinds.collect::<Vec<_>>(),
        [(CacheEntryKind::Block(0), 4), (CacheEntryKind::Block(1), 4)]
    );
    pool.check([&table]).unwrap();
}

#[test]
fn blocks_for_what_is_elsewhere_are_taken_or_all_given_back() {
    let groups = [(6, None), (4, Some(3))];
    let mut pool = BlockPool::with_hasher(&groups, 2, RandomState::new());
    let tokens: Vec<TokenId> = (0..9).collect();
    let mut first = computed(&mut pool, &salt(1), &tokens[..4]);
    pool.release(&mut first);
    // Two of four blocks are there, and of the window the last of these, which is not needed.
    let device = pool.device_prefix(&salt(1), &tokens, 4);
    assert_eq!(device.longest(4, |_, _| false), 2);
    assert_eq!(device.longest(4, |index, _| index != 2), 2);
    assert_eq!(
        device.longest(4, |_, kind| kind == CacheEntryKind::Block(0)),
        2
    );
    let wanted = [(2, 0), (3, 0), (3, 1)].map(|(n, group)| (n, CacheEntryKind::Block(group)));
    assert_eq!(device.missing(4).collect::<Vec<_>>(), wanted);
    let mut table = BlockTable::default();
    let taken = pool
        .take_blocks(&mut table, (&salt(1), &tokens), 4)
        .unwrap();
    let new: Vec<_> = taken.new.iter().map(|&(group, n, _)| (n, group)).collect();
    assert_eq!(new, [(2, 0), (3, 0), (3, 1)]);
    assert_eq!((table.held(0), table.held(1)), (4, 1));
    let mut replaced = BlockTable::default();
    pool.register(&mut table, &salt(1), &tokens[..8], &mut replaced);
    assert!(replaced.is_empty());
    pool.check([&table]).unwrap();
    // For another there are two blocks, not four.
    let mut other = BlockTable::default();
    assert!(
        pool.take_blocks(&mut other, (&salt(2), &tokens), 4)
            .is_none()
    );
    assert!(other.is_empty());
    pool.check([&table, &other]).unwrap();
    pool.release(&mut table);
    let mut again = pool.match_prefix(&salt(1), &tokens, 4);
    assert_eq!(again.len(), 4);
    pool.release(&mut again);
    pool.check([&again]).unwrap();
}

#[test]
fn a_window_is_enough_of_a_prefix() {
    let groups = [(20, None), (10, Some(3))];
    let mut pool = BlockPool::with_hasher(&groups, 2, RandomState::new());
    let none = CacheSalt::default();
    let tokens: Vec<TokenId> = (0..13).collect();
    let mut table = BlockTable::default();
    let mut replaced = BlockTable::default();
    for end in [4, 8, 12, 13] {
        assert!(pool.grow_to(&mut table, tokens.len(), end));
        pool.register(&mut table, &none, &tokens[..end], &mut replaced);
        pool.release_before_window(&mut table, end);
    }
    // Token 13 sees 11 and 12.
    assert_eq!((table.held(0), table.held(1)), (7, 2));
    assert_eq!(table.group(1)[..5], [BlockId::RELEASED; 5]);
    pool.check([&table]).unwrap();
    pool.release(&mut table);
    let found = |pool: &mut BlockPool, len: usize| {
        let mut table = pool.match_prefix(&none, &tokens[..len], usize::MAX);
        let found = (table.len(), table.held(0), table.held(1));
        pool.release(&mut table);
        found
    };
    // Six blocks; the token after them sees 10 and 11, which are the last of them.
    assert_eq!(found(&mut pool, 13), (6, 6, 1));
    assert_eq!(found(&mut pool, 9), (4, 4, 1));
    // The blocks of the window that are needed last go first.
    let mut other = BlockTable::default();
    assert!(pool.grow_to(&mut other, 1, 1));
    assert_eq!(pool.grow_windows(&mut other, 10), 2, "one block of each");
    assert!(pool.grow_to(&mut other, 10, 2));
    assert_eq!(pool.grow_windows(&mut other, 10), 10);
    assert_eq!((other.held(0), other.held(1)), (5, 5));
    pool.check([&other]).unwrap();
    assert_eq!(found(&mut pool, 13).0, 6);
    pool.release(&mut other);
    assert!(pool.grow(&mut other, 20));
    // Ten of twenty are left, and none of the window.
    assert_eq!(found(&mut pool, 13), (0, 0, 0));
    pool.check([&other]).unwrap();
}
