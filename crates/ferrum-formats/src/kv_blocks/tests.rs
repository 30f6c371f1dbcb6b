use super::*;
use proptest::prelude::*;

fn folder(limit: u64) -> (tempfile::TempDir, KvFolder) {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = KvFolder::open(dir.path().join("kv"), Some(limit)).expect("it opens");
    (dir, folder)
}

fn key(n: u8) -> KvBlockKey {
    KvBlockKey::root(b"model", b"salt").followed_by(&[n])
}

#[test]
fn what_is_written_is_read_also_by_the_next_process() {
    let (dir, folder) = folder(1 << 20);
    assert_eq!(
        folder.write(key(1), b"one", &[7; 100]),
        Ok(KvWritten::Written)
    );
    assert_eq!(
        folder.write(key(1), b"one", &[7; 100]),
        Ok(KvWritten::AlreadyStored)
    );
    let root = dir.path().join("kv");
    let busy = KvFolder::open(&root, None).expect_err("one at a time");
    assert!(busy.to_string().contains("another process"), "{busy}");
    drop(folder);
    std::fs::write(root.join("x.partial"), "cut off").expect("a file");
    let folder = KvFolder::open(&root, None).expect("it opens");
    assert_eq!(folder.read(key(1), b"one", 100), Ok(Some(vec![7; 100])));
    assert_eq!(folder.read(key(2), b"one", 100), Ok(None));
    let bytes = file_bytes(3, 100);
    let group = key(1).group();
    assert_eq!(folder.figures(group), KvGroupFigures { bytes, evicted: 0 });
    assert!(!root.join("x.partial").exists());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &Path| {
            std::fs::metadata(path)
                .expect("it is there")
                .permissions()
                .mode()
        };
        assert_eq!(mode(&root) & 0o777, 0o700);
        assert_eq!(mode(&folder.path(key(1))) & 0o777, 0o600);
        drop(folder);
        let open = std::fs::Permissions::from_mode(0o770);
        std::fs::set_permissions(&root, open).expect("a mode");
        let error = KvFolder::open(&root, None).expect_err("others may write");
        assert!(error.to_string().contains("mode 770"), "{error}");
    }
}

#[test]
fn another_description_or_length_is_no_hit_and_the_file_goes() {
    for (description, len) in [
        (&b"two"[..], 100),
        (b"one!", 100),
        (b"on", 100),
        (b"one", 99),
    ] {
        let (_dir, folder) = folder(1 << 20);
        folder.write(key(1), b"one", &[7; 100]).expect("written");
        assert!(folder.read(key(1), description, len).is_err());
        assert!(!folder.path(key(1)).exists());
        assert_eq!(folder.read(key(1), b"one", 100), Ok(None));
    }
}

#[test]
fn the_least_recently_used_goes_first() {
    let one = file_bytes(1, 100);
    let (_dir, folder) = folder(2 * one);
    for n in [1, 2] {
        folder.write(key(n), b"x", &[n; 100]).expect("written");
    }
    assert!(
        folder
            .read(key(1), b"x", 100)
            .is_ok_and(|found| found.is_some())
    );
    folder.write(key(3), b"x", &[3; 100]).expect("written");
    let there = [1, 2, 3].map(|n| folder.contains(key(n)) && folder.path(key(n)).exists());
    assert_eq!(there, [true, false, true]);
    assert!(!folder.path(key(2)).exists());
    let figures = folder.figures(key(1).group());
    assert_eq!((figures.bytes, figures.evicted), (2 * one, 1));
    let refused = folder.write(key(4), b"x", &[0; 1000]).expect("no error");
    assert!(matches!(refused, KvWritten::Refused(_)), "{refused:?}");
}

#[test]
fn a_file_that_vanished_is_a_miss() {
    let (_dir, folder) = folder(1 << 20);
    folder.write(key(1), b"x", &[1; 10]).expect("written");
    std::fs::remove_file(folder.path(key(1))).expect("it was there");
    assert_eq!(folder.read(key(1), b"x", 10), Ok(None));
    assert!(folder.is_empty());
}

proptest! {
    #[test]
    fn damage_anywhere_is_noticed(at in 0usize..155, bit in 0u8..8, cut in any::<bool>()) {
        let (_dir, folder) = folder(1 << 20);
        folder.write(key(1), b"a description", &[7; 100]).expect("written");
        let path = folder.path(key(1));
        let mut bytes = std::fs::read(&path).expect("it is there");
        let at = at % bytes.len();
        match cut {
            true => bytes.truncate(at),
            false => bytes[at] ^= 1 << bit,
        }
        std::fs::write(&path, &bytes).expect("a file");
        prop_assert!(folder.read(key(1), b"a description", 100).is_err());
        prop_assert!(!path.exists());
    }

    #[test]
    fn any_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("x.kv");
        let header = [&MAGIC_AND_VERSION[..], &bytes].concat();
        for bytes in [&bytes, &header] {
            std::fs::write(&path, bytes).expect("a file");
            if let Ok(file) = KvFile::open(&path, 64) {
                prop_assert!(file.payload_len() <= bytes.len() as u64);
                prop_assert!(file.into_payload().is_err());
            }
        }
    }
}

const MAGIC_AND_VERSION: [u8; 12] = *b"ferrumkv\x01\0\0\0";
