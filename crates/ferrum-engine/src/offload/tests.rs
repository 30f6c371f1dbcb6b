use super::*;
use ferrum_models::KvBlockPart;

fn block(n: u8, len: usize) -> StoredEntry {
    StoredEntry {
        key: KvBlockKey::root(b"group", b"").followed_by(&[n]),
        description: [n].into(),
        bytes: vec![n; len],
    }
}

fn layout(window: Option<usize>) -> KvBlockLayout {
    KvBlockLayout {
        dtype: "f16",
        block_size: 2,
        window,
        layers: vec![KvBlockPart {
            kv_heads: 1,
            key_dim: 4,
            value_dim: 4,
            bytes: 32,
        }],
        bytes: 32,
    }
}

/// The origins of a model with two groups and states.
fn origins(model: &str) -> Vec<Origin> {
    let layouts = EntryLayouts {
        groups: vec![layout(None), layout(Some(8))],
        state: Some(StateLayout {
            layers: vec![3, 3, 5],
            bytes: 44,
        }),
    };
    layouts.origins(model, "cpu")
}

#[test]
fn ram_keeps_what_was_used_last() {
    let mut ram = RamTier::new(3 * 101);
    for n in 0..3 {
        assert!(ram.insert(Arc::new(block(n, 100))).is_empty());
    }
    let group = block(0, 0).key.group();
    assert_eq!(ram.figures(group), (303, 0));
    assert!(ram.get(block(0, 0).key).is_some());
    let out = ram.insert(Arc::new(block(3, 100)));
    assert_eq!(out.iter().map(|b| b.bytes[0]).collect::<Vec<_>>(), [1]);
    let left: Vec<_> = ram.newest_first().iter().map(|b| b.bytes[0]).collect();
    assert_eq!(left, [3, 0, 2]);
    assert_eq!(ram.figures(group), (303, 1));
    // The same again takes no more room, and what never fits goes through.
    assert!(ram.insert(Arc::new(block(3, 100))).is_empty());
    let out = ram.insert(Arc::new(block(9, 1000)));
    assert_eq!(out.iter().map(|b| b.bytes[0]).collect::<Vec<_>>(), [9]);
    assert_eq!(ram.figures(group), (303, 1));
    assert_eq!(RamTier::new(0).insert(Arc::new(block(1, 1))).len(), 1);
}

#[test]
fn prefixes_differ_by_all_that_keys_and_values_depend_on() {
    let entry = |kind, model: &str, tenant: Option<&str>, prompt_len, tokens: &[TokenId]| {
        let origins = origins(model);
        let origin = origins.iter().find(|origin| origin.kind == kind);
        let salt = CacheSalt {
            tenant: tenant.map(Into::into),
            prompt_len,
            ..CacheSalt::default()
        };
        let origin = origin.expect("it has this kind");
        let prefix = Prefix::new(origin, &salt, tokens, 9).expect("it is shared");
        (prefix.block_keys[1], prefix.description(1))
    };
    let of = |model: &str, tenant: Option<&str>, prompt_len, tokens: &[TokenId]| {
        entry(CacheEntryKind::Block(0), model, tenant, prompt_len, tokens)
    };
    let tokens = [1, 2, 3, 4, 5];
    let all = [
        of("a", None, None, &tokens),
        of("b", None, None, &tokens),
        of("a", Some(""), None, &tokens),
        of("a", Some("t"), None, &tokens),
        of("a", None, Some(5), &tokens),
        of("a", None, None, &[1, 2, 3, 9]),
        of("a", None, None, &[9, 2, 3, 4]),
        entry(CacheEntryKind::Block(1), "a", None, None, &tokens),
        entry(CacheEntryKind::State, "a", None, None, &tokens),
    ];
    for (i, one) in all.iter().enumerate() {
        for other in &all[..i] {
            assert!(one.0 != other.0 && one.1 != other.1, "{i}");
        }
    }
    assert_eq!(
        of("a", None, None, &tokens),
        of("a", None, None, &tokens[..4])
    );
    let origins = origins("a");
    for salt in [
        CacheSalt {
            private: Some(1),
            ..CacheSalt::default()
        },
        CacheSalt {
            adapter: Some(ferrum_types::AdapterId(0)),
            ..CacheSalt::default()
        },
    ] {
        assert!(Prefix::new(&origins[0], &salt, &tokens, 9).is_none());
    }
}

#[test]
fn a_hash_is_not_taken_for_the_tokens() {
    let origins = origins("a");
    let prefix = Prefix::new(&origins[0], &CacheSalt::default(), &[1, 2, 3, 4], 9);
    let prefix = prefix.expect("it is shared");
    let stored = |description: Vec<u8>| StoredEntry {
        key: prefix.block_keys[1],
        description: description.into(),
        bytes: vec![0; 32],
    };
    assert!(prefix.is_of(1, &stored(prefix.description(1))));
    assert!(!prefix.is_of(0, &stored(prefix.description(1))));
    let mut other = prefix.description(1);
    let token = other.len() - 16;
    other[token] ^= 1;
    assert!(!prefix.is_of(1, &stored(other)));
}

#[test]
fn what_ram_has_reaches_the_disk_in_the_end() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = OffloadConfig {
        ram_bytes: 1 << 20,
        dir: Some(dir.path().join("kv")),
        dir_bytes: Some(1 << 20),
    };
    let offload = KvOffload::open(&config).expect("it opens");
    for n in 0..200 {
        offload.store(block(n, 100), None);
    }
    offload.finish(Duration::from_secs(60));
    offload.store(block(250, 2 << 20), None);
    drop(offload);
    let folder = KvFolder::open(dir.path().join("kv"), None).expect("it opens");
    assert_eq!(folder.len(), 200);
    let read = folder
        .read(block(7, 0).key, &[7], 100)
        .expect("it is whole");
    assert_eq!(read, Some(vec![7; 100]));
}

/// The key of an image is meaningless to other engines.
#[test]
fn blocks_after_an_image_stay_on_the_device() {
    let (origins, salt) = (origins("a"), CacheSalt::default());
    let image = crate::image_embeddings::FIRST_CACHE_KEY | 7;
    for (tokens, blocks) in [
        (&[1, 2, 3, 4, 5, 6][..], 3),
        (&[1, 2, 3, image, 4, 5], 1),
        (&[1, 2, image, image, 4, 5], 1),
        (&[image, image, 1, 2], 0),
    ] {
        let prefix = Prefix::new(&origins[0], &salt, tokens, usize::MAX);
        assert_eq!(prefix.map(|prefix| prefix.block_keys.len()), Some(blocks));
    }
}
