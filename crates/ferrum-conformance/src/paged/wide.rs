//! Cases for devices that give heads of some widths to matrix units, with tiles of queries and of keys: lengths around a tile and
//! beyond, many queries beside decodes, and rows of which some see nothing of a tile.

use super::Change;

/// Cases of many sequences whose heads devices may give to matrix units.
pub(super) const MANY_WIDE: &[(&str, Change)] = &[
    ("heads of 64", |_| {}),
    ("heads of 64, blocks of 7, window 20", |s| {
        (s.block_size, s.window) = (7, Some(20));
    }),
    ("heads of 64, sinks, window and softcap", |s| {
        (s.sinks, s.window, s.softcap) = (true, Some(6), Some(5.0));
    }),
    ("heads of 64, chunks of 40 of 150 and 70", |s| {
        (s.window, s.chunked, s.block_size) = (Some(40), true, 7);
        s.seqs = &[(149, 1), (90, 70), (0, 150)];
    }),
    ("heads of 64, not causal, window 50 of 150 and 70", |s| {
        (s.causal, s.window) = (false, Some(50));
        s.seqs = &[(0, 150), (90, 70), (200, 1)];
    }),
    ("heads 7:1 of 128, decode of 1, 2 and 700 keys", |s| {
        (s.heads, s.head_dim, s.block_size) = ((7, 1), 128, 7);
        s.seqs = &[(0, 1), (1, 1), (699, 1), (0, 0), (299, 2)];
    }),
    ("heads 4:1 of 128, 130 and 17 queries beside decode", |s| {
        (s.heads, s.head_dim, s.sinks) = ((8, 2), 128, true);
        s.seqs = &[(130, 130), (640, 1), (20, 17), (0, 0), (63, 1)];
    }),
    (
        "heads 4:1 of 128, 70 queries of 270 keys, blocks of 7",
        |s| {
            (s.heads, s.head_dim, s.block_size) = ((4, 1), 128, 7);
            s.seqs = &[(200, 70), (0, 33), (0, 0), (5, 129)];
        },
    ),
    ("heads 3:1 of 128, window 150 of 331 keys, softcap", |s| {
        (s.heads, s.head_dim, s.block_size) = ((3, 1), 128, 24);
        (s.window, s.softcap, s.sinks) = (Some(150), Some(5.0), true);
        s.seqs = &[(130, 201), (40, 1), (0, 45)];
    }),
    ("heads 2:1 of 128, chunks of 100, blocks of 5", |s| {
        (s.heads, s.head_dim, s.block_size) = ((4, 2), 128, 5);
        (s.window, s.chunked) = (Some(100), true);
        s.seqs = &[(77, 140), (260, 3), (0, 67)];
    }),
    ("heads 2:1 of 128, not causal, window 60", |s| {
        (s.heads, s.head_dim, s.causal, s.window) = ((2, 1), 128, false, Some(60));
        s.seqs = &[(0, 190), (90, 40)];
    }),
    ("heads 1:1 of 128, not causal, sinks", |s| {
        (s.heads, s.head_dim, s.causal, s.sinks) = ((2, 2), 128, false, true);
        s.seqs = &[(140, 66), (0, 129), (0, 2)];
    }),
    ("heads 8:1 of 64, 40 queries of 1240 keys", |s| {
        (s.heads, s.block_size) = ((8, 1), 48);
        s.seqs = &[(1200, 40), (0, 7)];
    }),
    // Few rows over one kv head: less than a device has room for, even one of four processors.
    ("heads 4:1 of 128, decode of 1100 and 65 keys", |s| {
        (s.heads, s.head_dim) = ((4, 1), 128);
        s.seqs = &[(1099, 1), (64, 1), (0, 0)];
    }),
    (
        "heads 3:1 of 128, decode of 301 keys, window 150, sinks, softcap",
        |s| {
            (s.heads, s.head_dim, s.block_size) = ((3, 1), 128, 24);
            (s.window, s.softcap, s.sinks) = (Some(150), Some(5.0), true);
            s.seqs = &[(300, 1), (298, 5), (0, 2)];
        },
    ),
    ("heads 8:1 of 64, decode of 500 keys, sinks, softcap", |s| {
        (s.heads, s.softcap, s.sinks) = ((8, 1), Some(5.0), true);
        s.seqs = &[(499, 1), (30, 1)];
    }),
    ("heads 2:1 of 64, few queries of chunks of 100", |s| {
        (s.heads, s.block_size) = ((2, 1), 7);
        (s.window, s.chunked) = (Some(100), true);
        s.seqs = &[(260, 3), (198, 7), (0, 1)];
    }),
    (
        "heads 2:1 of 128, few queries, not causal, window 60",
        |s| {
            (s.heads, s.head_dim, s.causal, s.window) = ((2, 1), 128, false, Some(60));
            s.seqs = &[(90, 9), (200, 1), (0, 16)];
        },
    ),
    ("heads 1:1 of 128, few queries, not causal, sinks", |s| {
        (s.heads, s.head_dim, s.causal, s.sinks) = ((1, 1), 128, false, true);
        s.seqs = &[(140, 2), (0, 32)];
    }),
    (
        "heads 2:1 of 128, decode of 702 keys beside a prompt",
        |s| {
            (s.heads, s.head_dim) = ((2, 1), 128);
            s.seqs = &[(700, 2), (0, 40)];
        },
    ),
    ("heads 1:1 of 96, decode of 300 and 64 keys", |s| {
        (s.heads, s.head_dim) = ((2, 2), 96);
        s.seqs = &[(299, 1), (63, 1)];
    }),
    ("heads 4:1 of 256, 130 queries beside decode", |s| {
        (s.heads, s.head_dim, s.block_size) = ((4, 1), 256, 32);
        s.seqs = &[(20, 130), (300, 1), (31, 2)];
    }),
    ("heads 4:1 of 512, 40 queries beside decode", |s| {
        (s.heads, s.head_dim, s.block_size) = ((4, 1), 512, 24);
        s.seqs = &[(20, 40), (300, 1), (31, 2)];
    }),
    ("heads 2:1 of 320, window 50, sinks, softcap", |s| {
        (s.heads, s.head_dim) = ((2, 1), 320);
        (s.window, s.softcap, s.sinks) = (Some(50), Some(5.0), true);
        s.seqs = &[(60, 33), (129, 1)];
    }),
    (
        "latent rows of 64, values of 48, 40 queries beside decode",
        |s| {
            (s.heads, s.head_dim, s.value_dim, s.latent) = ((16, 1), 64, 48, true);
            s.seqs = &[(300, 1), (100, 40), (0, 1)];
        },
    ),
    (
        "latent rows of 576, values of 512, decode of 300 keys",
        |s| {
            (s.heads, s.head_dim, s.value_dim, s.latent) = ((40, 1), 576, 512, true);
            s.seqs = &[(299, 1), (33, 1)];
        },
    ),
];
