use super::file::{CHUNK, MAGIC};
use super::folder::EXTENSION;
use super::*;
use ferrum_test_support::skip;
use proptest::prelude::*;
use std::cell::Cell;
use std::fs;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const LAYOUT: &str = "1-80";

/// A folder with a model and a cache of at most `limit` bytes.
struct Setup {
    dir: TempDir,
    cache: WeightCache,
}

impl Setup {
    fn new(limit: u64) -> Self {
        let dir = TempDir::new().unwrap();
        let cache = WeightCache::new(dir.path().join("packed"), Some(limit));
        Self { dir, cache }
    }

    /// The key of a model of this name, which is written if it is not there.
    fn key(&self, name: &str) -> CacheKey {
        let path = self.dir.path().join(name);
        if !path.exists() {
            fs::write(&path, name).unwrap();
        }
        CacheKey::new(vec![FileIdentity::of(&path).unwrap()], LAYOUT.into())
    }

    /// Writes a file; what the cache says where it will not.
    fn keep(&self, key: &CacheKey, entries: &[(&str, Vec<u8>)]) -> Option<WriteReservation> {
        let halves: Vec<[&[u8]; 2]> = entries
            .iter()
            .map(|(_, bytes)| bytes.split_at(bytes.len() / 2).into())
            .collect();
        let entries = entries.iter().zip(&halves);
        let new: Vec<_> = entries
            .map(|((name, _), panels)| NewEntry {
                name: entry_name(name.as_bytes()),
                description: &[1, 2, 3],
                panels,
            })
            .collect();
        let bytes = new.iter().map(NewEntry::bytes).sum();
        match self.cache.reserve(key, bytes).unwrap() {
            WriteReservation::Granted(mut writer) => {
                // In steps, as when it is asked to stop.
                let calls = Cell::new(0);
                let once = || calls.replace(calls.get() + 1) % 2 == 0;
                while !self.cache.write(&mut writer, &new, &once).unwrap() {}
                None
            }
            other => Some(other),
        }
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.cache.root())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn file(&self, key: &CacheKey) -> PathBuf {
        self.cache.folder.file(&key.stem(), EXTENSION)
    }

    fn is_ready(&self, key: &CacheKey) -> bool {
        matches!(self.cache.find(key, 2).unwrap(), CacheLookup::Ready(_))
    }
}

/// Bytes of which no two stretches are alike.
fn bytes(len: usize) -> Vec<u8> {
    (0..len as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect()
}

#[test]
fn what_is_written_is_found_aligned() {
    let setup = Setup::new(1 << 30);
    let key = setup.key("model.gguf");
    assert!(matches!(
        setup.cache.find(&key, 2).unwrap(),
        CacheLookup::Absent
    ));
    let entries = [
        ("a", bytes(100)),
        ("b", bytes(2 * CHUNK + 7)),
        ("c", Vec::new()),
        ("d", bytes(128)),
    ];
    setup.keep(&key, &entries);
    let CacheLookup::Ready(file) = setup.cache.find(&key, 2).unwrap() else {
        panic!("it was written");
    };
    assert_eq!(file.len(), 4);
    for (name, bytes) in &entries {
        let (description, panels) = file.entry(&entry_name(name.as_bytes())).unwrap();
        assert_eq!(description, [1, 2, 3]);
        assert!(panels.start.is_multiple_of(64) && panels.len().is_multiple_of(64));
        // Each half at a place of its own.
        let all = &file.as_ref()[panels];
        let (first, second) = bytes.split_at(bytes.len() / 2);
        assert_eq!(&all[..first.len()], first);
        let second_at = first.len().next_multiple_of(64);
        assert_eq!(&all[second_at..][..second.len()], second);
        assert_eq!(all.len(), second_at + second.len().next_multiple_of(64));
    }
    assert!(file.verify(1) && file.verify(3));
    assert!(file.entry(&entry_name(b"e")).is_none());
}

#[test]
fn a_changed_byte_is_noticed_wherever_it_is() {
    let setup = Setup::new(1 << 30);
    let key = setup.key("model.gguf");
    let keep = || setup.keep(&key, &[("a", bytes(CHUNK + 100)), ("b", bytes(200))]);
    keep();
    let path = setup.file(&key);
    let whole = fs::read(&path).unwrap();
    let end = whole.len() - 1;
    let places = [0, 1, CHUNK - 1, CHUNK, CHUNK + 70, CHUNK + 200, end - 300];
    for at in places.into_iter().chain(end - 60..=end) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        fs::write(&path, damaged).unwrap();
        let found = setup.cache.find(&key, 2).unwrap();
        assert!(
            matches!(found, CacheLookup::Damaged(_)),
            "byte {at}: {found:?}"
        );
        assert!(!path.exists(), "what is damaged goes");
        assert!(matches!(
            setup.cache.find(&key, 2).unwrap(),
            CacheLookup::Absent
        ));
        keep();
        assert!(setup.is_ready(&key));
    }
    for len in [0, 1, 47, 48, CHUNK, end] {
        fs::write(&path, &whole[..len]).unwrap();
        assert!(
            matches!(setup.cache.find(&key, 2).unwrap(), CacheLookup::Damaged(_)),
            "{len} bytes"
        );
        keep();
    }
}

#[test]
fn a_note_saves_checking_until_the_file_is_changed() {
    let setup = Setup::new(1 << 30);
    let key = setup.key("model.gguf");
    setup.keep(&key, &[("a", bytes(1000))]);
    let file = PackedFile::open(&setup.file(&key)).unwrap();
    if !fs::exists("/proc/sys/kernel/random/boot_id").unwrap() {
        skip("the system does not name its starts");
        return;
    }
    assert!(setup.cache.folder.is_verified(&file));
    drop(file);
    // The same length and time of writing: the time of change is the system's.
    let path = setup.file(&key);
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let mut damaged = fs::read(&path).unwrap();
    damaged[500] ^= 1;
    fs::write(&path, damaged).unwrap();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    assert!(matches!(
        setup.cache.find(&key, 2).unwrap(),
        CacheLookup::Damaged(_)
    ));
}

#[test]
fn a_model_that_was_changed_has_another_key() {
    let setup = Setup::new(1 << 30);
    let before = setup.key("model.gguf");
    setup.keep(&before, &[("a", bytes(1000))]);
    assert!(setup.is_ready(&before));
    let path = setup.dir.path().join("model.gguf");
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    fs::write(&path, "MODEL.GGUF").unwrap();
    fs::File::options()
        .write(true)
        .open(&path)
        .unwrap()
        .set_modified(modified)
        .unwrap();
    let after = setup.key("model.gguf");
    assert_ne!(before, after);
    assert!(!setup.is_ready(&after));
    assert_eq!(
        setup.cache.entries().unwrap()[0].state,
        WeightState::Outdated
    );
    let other = CacheKey::new(before.content.files.clone(), "2-80".into());
    assert!(!setup.is_ready(&other), "another layout");
    // A file under a name that is not that of its key.
    fs::copy(setup.file(&before), setup.file(&after)).unwrap();
    assert!(matches!(
        setup.cache.find(&after, 2).unwrap(),
        CacheLookup::Damaged(_)
    ));
}

#[test]
fn the_least_recently_used_goes_first() {
    // Each file has 10,048 bytes of panels and less than 1,000 besides.
    let setup = Setup::new(35_000);
    let keys = ["a", "b", "c", "d"].map(|name| setup.key(name));
    let state = |key: &CacheKey| setup.cache.folder.file(&key.stem(), "state");
    for (i, key) in keys[..3].iter().enumerate() {
        setup.keep(key, &[("x", bytes(10_000))]);
        let used = SystemTime::now() - Duration::from_secs(1000 - i as u64);
        fs::File::options()
            .write(true)
            .open(state(key))
            .unwrap()
            .set_modified(used)
            .unwrap();
    }
    match setup.cache.find(&keys[0], 1).unwrap() {
        CacheLookup::Ready(file) => file.set_used(),
        other => panic!("{other:?}"),
    }
    setup.keep(&keys[3], &[("x", bytes(10_000))]);
    let left = keys.each_ref().map(|key| setup.file(key).exists());
    assert_eq!(left, [true, false, true, true]);
    // What can no longer be used goes before all else.
    fs::write(setup.dir.path().join("d"), "another").unwrap();
    let new = setup.key("d");
    setup.keep(&new, &[("x", bytes(10_000))]);
    let left = keys.each_ref().map(|key| setup.file(key).exists());
    assert_eq!(left, [true, false, true, false]);
    assert!(setup.is_ready(&new));
}

#[test]
fn what_does_not_fit_is_not_written() {
    let setup = Setup::new(5_000);
    let (small, large) = (setup.key("small"), setup.key("large"));
    setup.keep(&small, &[("x", bytes(2_000))]);
    let Some(WriteReservation::Refused(reason)) = setup.keep(&large, &[("x", bytes(10_000))])
    else {
        panic!("it is larger than the cache may be");
    };
    assert!(reason.contains("may hold 5000"), "{reason}");
    // Larger than any disk has left.
    let cache = WeightCache::new(setup.cache.root(), Some(u64::MAX));
    let WriteReservation::Refused(reason) = cache.reserve(&large, u64::MAX / 2).unwrap() else {
        panic!("no disk is so large");
    };
    assert!(reason.contains("stay free"), "{reason}");
    assert!(setup.is_ready(&small), "nothing went for it");
    assert_eq!(setup.cache.entries().unwrap().len(), 1);
}

#[test]
fn one_writes_and_what_is_given_up_leaves_nothing() {
    let setup = Setup::new(1 << 30);
    let key = setup.key("model");
    let WriteReservation::Granted(mut writer) = setup.cache.reserve(&key, 1000).unwrap() else {
        panic!("there is room");
    };
    assert!(matches!(
        setup.cache.reserve(&key, 1000).unwrap(),
        WriteReservation::Busy
    ));
    let other = setup.key("other");
    let second = setup.cache.reserve(&other, 1000).unwrap();
    assert!(
        matches!(second, WriteReservation::Granted(_)),
        "another model"
    );
    drop(second);
    let panels: [&[u8]; 1] = [&[7; 1000]];
    let entry = NewEntry {
        name: entry_name(b"x"),
        description: &[],
        panels: &panels,
    };
    assert!(!setup.cache.write(&mut writer, &[entry], &|| false).unwrap());
    drop(writer);
    assert_eq!(setup.names(), ["lock"]);
    // What a process left that was killed has no lock any more.
    let left = setup
        .cache
        .folder
        .file(&format!("{}.1", key.stem()), "partial");
    fs::write(&left, "half").unwrap();
    assert!(matches!(
        setup.cache.reserve(&key, 1000).unwrap(),
        WriteReservation::Granted(_)
    ));
    assert!(!left.exists());
}

#[test]
fn clearing_removes_what_is_of_a_model_or_all() {
    let setup = Setup::new(1 << 30);
    assert_eq!(
        setup.cache.clear(None).unwrap(),
        (0, 0),
        "there is no folder"
    );
    for name in ["a", "b", "c"] {
        setup.keep(&setup.key(name), &[("x", bytes(100))]);
    }
    let (count, bytes) = setup
        .cache
        .clear(Some(&setup.dir.path().join("b")))
        .unwrap();
    assert!(count == 1 && bytes > 100);
    assert_eq!(setup.cache.entries().unwrap().len(), 2);
    assert_eq!(setup.cache.clear(Some(setup.dir.path())).unwrap().0, 2);
    assert_eq!(setup.names(), ["lock"]);
}

#[cfg(unix)]
#[test]
fn a_folder_that_others_can_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let setup = Setup::new(1 << 30);
    let key = setup.key("model");
    setup.keep(&key, &[("x", bytes(100))]);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(setup.cache.root()), 0o700);
    assert_eq!(mode(&setup.file(&key)), 0o600);
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(setup.cache.root(), open).unwrap();
    let fault = setup.cache.find(&key, 1).unwrap_err().to_string();
    assert!(fault.contains("mode 777"), "{fault}");
    assert!(setup.cache.reserve(&key, 10).is_err());
    assert!(setup.cache.clear(None).is_err());
}

#[test]
fn other_versions_are_unreadable() {
    let setup = Setup::new(1 << 30);
    let key = setup.key("model");
    setup.keep(&key, &[("x", bytes(100))]);
    let path = setup.file(&key);
    let mut file = fs::read(&path).unwrap();
    let footer = file.len() - 48;
    file[footer + 8] = 2;
    let sum = twox_hash::XxHash3_64::oneshot(&file[footer..footer + 40]);
    file[footer + 40..].copy_from_slice(&sum.to_le_bytes());
    fs::write(&path, &file).unwrap();
    let fault = PackedFile::open(&path).unwrap_err().to_string();
    assert!(fault.contains("another version"), "{fault}");
    assert_eq!(
        setup.cache.entries().unwrap()[0].state,
        WeightState::Unreadable
    );
}

proptest! {
    /// Tables with right checksums are no more to be trusted than others.
    #[test]
    fn hostile_tables_are_refused(
        panels in prop::collection::vec(any::<u8>(), 0..200),
        key in prop::collection::vec(any::<u8>(), 0..8),
        count in prop_oneof![Just(u64::MAX), 0..4u64],
        entries in prop::collection::vec((any::<[u64; 4]>(), 0..300u64, 0..300u64), 0..4),
        cut in 0..100usize,
    ) {
        let mut table = (key.len() as u32).to_le_bytes().to_vec();
        table.extend(&key);
        table.extend(vec![0; panels.len().div_ceil(CHUNK) * 8]);
        table.extend(count.to_le_bytes());
        for (numbers, start, len) in entries {
            table.extend(numbers[0].to_le_bytes());
            table.extend(numbers[1].to_le_bytes());
            let at = if numbers[2] % 4 == 0 { numbers[2] } else { start / 64 * 64 };
            table.extend(at.to_le_bytes());
            table.extend((if numbers[3] % 4 == 0 { numbers[3] } else { len }).to_le_bytes());
            table.extend(0u32.to_le_bytes());
        }
        table.truncate(table.len().saturating_sub(cut / 10));
        if let Ok(file) = PackedFile::from_vec(Path::new("hostile"), PackedFile::sealed(&panels, &table)) {
            for name in file.names() {
                let (_, place) = file.entry(&name).unwrap();
                prop_assert!(place.end <= panels.len());
            }
            file.verify(2);
        }
    }

    #[test]
    fn any_bytes_are_refused_or_read(mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        if let Some(at) = bytes.len().checked_sub(48) {
            bytes[at..at + 8].copy_from_slice(&MAGIC);
        }
        let _ = PackedFile::from_vec(Path::new("hostile"), bytes);
    }
}

/// Kilobytes of `field` in what Linux says of the mappings of `path` in this process.
#[cfg(target_os = "linux")]
fn mapped(path: &Path, field: &str) -> Vec<u64> {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let name = path.canonicalize().unwrap();
    let (mut own, mut found) = (false, Vec::new());
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or("");
        if !first.ends_with(':') {
            own = line.ends_with(name.to_str().unwrap());
        } else if own && first.trim_end_matches(':') == field {
            found.extend(words.next().and_then(|n| n.parse::<u64>().ok()));
        }
    }
    found
}

#[cfg(target_os = "linux")]
#[test]
fn who_maps_the_same_file_has_the_same_memory() {
    let setup = Setup::new(1 << 30);
    let key = setup.key("model");
    setup.keep(&key, &[("x", bytes(8 << 20))]);
    let open = || match setup.cache.find(&key, 1).unwrap() {
        CacheLookup::Ready(file) => file,
        other => panic!("{other:?}"),
    };
    let files = [open(), open()];
    for file in &files {
        file.populate();
        // Kernels before 5.14 populate nothing that is not touched.
        assert!(file.verify(1));
    }
    let path = setup.file(&key);
    let (resident, own) = (mapped(&path, "Rss"), mapped(&path, "Pss"));
    if resident.len() != 2 {
        skip(format_args!(
            "the system tells of {} mappings",
            resident.len()
        ));
        return;
    }
    // Each page is in memory once, so a half of it is each mapping's.
    assert!(resident.iter().all(|&kb| kb >= 8 << 10), "{resident:?}");
    let all = own.iter().sum::<u64>();
    assert!(all <= resident[0] + 64, "{own:?} of {resident:?}");
    assert_eq!(mapped(&path, "Private_Dirty"), [0, 0]);
}
