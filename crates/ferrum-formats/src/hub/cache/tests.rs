//! The layout, with a folder made by hand as `huggingface_hub` would.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::*;
use std::os::unix::fs::symlink;
use std::path::Path;
use tempfile::TempDir;

const FIRST: &str = "1111111111111111111111111111111111111111";
const SECOND: &str = "2222222222222222222222222222222222222222";

fn commit(text: &str) -> Commit {
    Commit::parse(text).unwrap()
}

fn revision(text: &str) -> Revision {
    Revision::parse(text).unwrap()
}

struct Cache {
    dir: TempDir,
    cache: HubCache,
    repo: CachedRepo,
}

impl Cache {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let cache = HubCache::new(dir.path());
        let repo = cache.repo(&RepoId::parse("org/name").unwrap());
        Self { dir, cache, repo }
    }

    fn add(&self, at: &str, file: &str, contents: &str) {
        let etag = Etag::parse(&format!("hash-of-{contents}")).unwrap();
        let lock = self.repo.try_lock(&etag).unwrap().unwrap();
        fs::write(&lock.incomplete, contents).unwrap();
        lock.finish().unwrap();
        self.repo.link(&commit(at), file, &etag).unwrap();
    }

    /// Two commits that share a file, of which `main` is the second.
    fn two() -> Self {
        let cache = Self::new();
        cache.add(FIRST, "config.json", "old");
        cache.add(FIRST, "sub/x-Q8_0.gguf", "shared");
        cache.add(SECOND, "config.json", "new");
        cache.add(SECOND, "sub/x-Q8_0.gguf", "shared");
        cache.add(SECOND, "x-Q4_K_M.gguf", "small");
        cache
            .repo
            .set_commit(&revision("v1"), &commit(FIRST))
            .unwrap();
        cache
            .repo
            .set_commit(&Revision::default(), &commit(SECOND))
            .unwrap();
        cache
            .repo
            .set_commit(&revision("refs/pr/1"), &commit(SECOND))
            .unwrap();
        cache
    }

    fn path(&self, rest: &str) -> PathBuf {
        self.repo.dir.join(rest)
    }

    fn find(&self, name: &str, at: &str) -> Option<PathBuf> {
        let name = ModelName::parse(name).unwrap();
        self.repo
            .find(&name, &revision(at), DownloadScope::Model)
            .unwrap()
    }

    fn blobs(&self) -> Vec<String> {
        let mut names = names(&self.path("blobs"));
        names.sort();
        names
    }
}

fn names(folder: &Path) -> Vec<String> {
    super::super::scan::names_in(folder).unwrap()
}

#[test]
fn links_are_relative_and_found_again() {
    let cache = Cache::two();
    let link = fs::read_link(cache.path(&format!("snapshots/{FIRST}/sub/x-Q8_0.gguf"))).unwrap();
    assert_eq!(link, Path::new("../../../blobs/hash-of-shared"));
    assert_eq!(
        fs::read_to_string(cache.path("refs/refs/pr/1")).unwrap(),
        SECOND
    );
    let found = cache.find("org/name", "main").unwrap();
    assert!(found.ends_with(format!("snapshots/{SECOND}/x-Q4_K_M.gguf")));
    assert_eq!(fs::read_to_string(found).unwrap(), "small");
    assert!(
        cache
            .find("org/name:q8_0", "v1")
            .unwrap()
            .ends_with("sub/x-Q8_0.gguf")
    );
    assert!(cache.find("org/name:Q8_0", FIRST).is_some());
    assert_eq!(cache.find("org/name:Q4_K_M", "v1"), None);
    assert_eq!(cache.find("org/name", "v2"), None);
    assert_eq!(cache.find("org/name", &"3".repeat(40)), None);
}

#[test]
fn a_model_is_there_when_all_of_its_shards_are() {
    let cache = Cache::new();
    let index = r#"{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#;
    cache.add(FIRST, "config.json", "config");
    let etag = Etag::parse("index").unwrap();
    let lock = cache.repo.try_lock(&etag).unwrap().unwrap();
    fs::write(&lock.incomplete, index).unwrap();
    lock.finish().unwrap();
    cache
        .repo
        .link(&commit(FIRST), "model.safetensors.index.json", &etag)
        .unwrap();
    cache.add(FIRST, "m-1.safetensors", "one");
    assert_eq!(cache.find("org/name", FIRST), None);
    cache.add(FIRST, "m-2.safetensors", "two");
    assert_eq!(
        cache.find("org/name", FIRST),
        Some(cache.path(&format!("snapshots/{FIRST}")))
    );
    // A blob that is gone makes its link nothing.
    fs::remove_file(cache.path("blobs/hash-of-two")).unwrap();
    assert_eq!(cache.find("org/name", FIRST), None);
}

#[test]
fn what_is_there_is_listed() {
    let cache = Cache::two();
    fs::create_dir_all(cache.dir.path().join("datasets--a--b")).unwrap();
    fs::create_dir_all(cache.dir.path().join("models--..--b")).unwrap();
    fs::write(cache.path("refs/broken"), "../../x").unwrap();
    let (models, problems) = cache.cache.models().unwrap();
    assert!(problems.is_empty());
    let [model] = models.as_slice() else {
        panic!("{models:?}")
    };
    assert_eq!(model.repo.to_string(), "org/name");
    assert_eq!(model.bytes, "oldnewsharedsmall".len() as u64);
    let refs: Vec<_> = model.snapshots.iter().map(|s| s.refs.join(" ")).collect();
    assert_eq!(refs, ["v1", "main refs/pr/1"]);
    assert_eq!(model.snapshots[1].files.len(), 3);
    let nowhere = HubCache::new(cache.dir.path().join("nowhere"));
    assert!(nowhere.models().unwrap().0.is_empty());
}

#[test]
fn a_revision_goes_without_what_another_one_uses() {
    for revision in ["main", "refs/pr/1", SECOND, &SECOND[..7]] {
        let cache = Cache::two();
        let removal = cache
            .repo
            .removal(Some(&self::revision(revision)), None)
            .unwrap();
        assert!(!removal.whole);
        assert_eq!(removal.bytes, "newsmall".len() as u64);
        removal.execute().unwrap();
        assert_eq!(cache.blobs(), ["hash-of-old", "hash-of-shared"]);
        assert_eq!(names(&cache.path("snapshots")), [FIRST]);
        assert!(!cache.path("refs/main").exists() && !cache.path("refs/refs/pr/1").exists());
        assert!(cache.find("org/name", "v1").is_some());
    }
}

#[test]
fn a_file_goes_from_all_revisions_or_one() {
    let cache = Cache::two();
    let removal = cache
        .repo
        .removal(Some(&revision("main")), Some("Q8_0"))
        .unwrap();
    assert_eq!((removal.bytes, removal.files.len()), (0, 1));
    removal.execute().unwrap();
    assert!(cache.find("org/name:Q8_0", "v1").is_some());
    assert!(!cache.path(&format!("snapshots/{SECOND}/sub")).exists());
    cache
        .repo
        .removal(None, Some("sub/x-Q8_0.gguf"))
        .unwrap()
        .execute()
        .unwrap();
    assert_eq!(
        cache.blobs(),
        ["hash-of-new", "hash-of-old", "hash-of-small"]
    );
}

#[test]
fn all_of_it_goes_with_its_locks() {
    let cache = Cache::two();
    let removal = cache.repo.removal(None, None).unwrap();
    assert!(removal.whole && removal.bytes > 0);
    removal.execute().unwrap();
    assert!(!cache.repo.dir.exists() && !cache.repo.locks.exists());
    // The last revision takes the rest with it.
    let cache = Cache::new();
    cache.add(FIRST, "x.gguf", "x");
    let removal = cache.repo.removal(Some(&revision(FIRST)), None).unwrap();
    assert!(removal.whole);
    removal.execute().unwrap();
    assert!(!cache.repo.dir.exists());
}

#[test]
fn what_is_not_there_or_in_use_is_not_removed() {
    let cache = Cache::two();
    for (at, file) in [
        (Some("v2"), None),
        (Some("222222"), None),
        (None, Some("Q2_K")),
    ] {
        let at = at.map(revision);
        let error = cache
            .repo
            .removal(at.as_ref(), file)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("in the cache\nhint: `ferrum list`"),
            "{error}"
        );
    }
    let other = cache.cache.repo(&RepoId::parse("org/other").unwrap());
    assert!(
        other
            .removal(None, None)
            .unwrap_err()
            .to_string()
            .contains("is not in the cache")
    );
    let etag = Etag::parse("hash-of-small").unwrap();
    let held = cache.repo.try_lock(&etag).unwrap().unwrap();
    assert!(cache.repo.try_lock(&etag).unwrap().is_none());
    for at in [None, Some(revision("main"))] {
        let removal = cache.repo.removal(at.as_ref(), None).unwrap();
        let error = removal.execute().unwrap_err().to_string();
        assert!(error.contains("is being downloaded"), "{error}");
    }
    drop(held);
    assert!(cache.find("org/name", "main").is_some());
}

#[test]
fn links_out_of_the_cache_are_refused() {
    let cache = Cache::two();
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("x-Q4_K_M.gguf");
    fs::write(&secret, "secret").unwrap();
    let snapshot = cache.path(&format!("snapshots/{FIRST}"));
    symlink(&secret, snapshot.join("x-Q4_K_M.gguf")).unwrap();
    let name = ModelName::parse("org/name").unwrap();
    let error = cache
        .repo
        .find(&name, &revision("v1"), DownloadScope::Model)
        .unwrap_err();
    assert!(
        error.to_string().contains("leads out of the cache"),
        "{error}"
    );
    assert_eq!(cache.cache.models().unwrap().1.len(), 1);
    // A folder that leads elsewhere is no place for files of ours.
    symlink(outside.path(), snapshot.join("away")).unwrap();
    let etag = Etag::parse("hash-of-small").unwrap();
    let error = cache
        .repo
        .link(&commit(FIRST), "away/x.gguf", &etag)
        .unwrap_err();
    assert!(
        error.to_string().contains("leads out of the cache"),
        "{error}"
    );
    for file in ["../x", "/x", "a/../../x", "a\\x", ""] {
        assert!(
            cache.repo.link(&commit(FIRST), file, &etag).is_err(),
            "{file:?}"
        );
    }
    // Removing follows no link.
    cache.repo.removal(None, None).unwrap().execute().unwrap();
    assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    symlink(outside.path(), &cache.repo.dir).unwrap();
    assert!(cache.repo.removal(None, None).is_err());
    assert!(secret.exists());
}

#[test]
fn a_blob_may_be_one_that_repositories_share() {
    let cache = Cache::two();
    let store = cache.dir.path().join("blobs/ab");
    fs::create_dir_all(&store).unwrap();
    fs::write(store.join("abcd"), "small").unwrap();
    let blob = cache.path("blobs/hash-of-small");
    fs::remove_file(&blob).unwrap();
    symlink("../../blobs/ab/abcd", &blob).unwrap();
    assert!(cache.find("org/name:Q4_K_M", "main").is_some());
    let removal = cache.repo.removal(None, Some("Q4_K_M")).unwrap();
    assert_eq!(removal.bytes, 0);
    removal.execute().unwrap();
    assert!(!blob.exists() && store.join("abcd").exists());
}

#[test]
fn a_ref_is_held_against_what_a_commit_is() {
    let cache = Cache::two();
    fs::write(cache.path("refs/main"), format!("{FIRST}\n")).unwrap();
    assert_eq!(
        cache.repo.commit(&Revision::default()).unwrap(),
        Some(commit(FIRST))
    );
    for text in ["", "../../../etc", &"1".repeat(100_000)] {
        fs::write(cache.path("refs/main"), text).unwrap();
        let error = cache
            .repo
            .commit(&Revision::default())
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("expected a commit\nhint: `ferrum pull org/name`"),
            "{error}"
        );
    }
    cache
        .repo
        .set_commit(&Revision::default(), &commit(SECOND))
        .unwrap();
    assert_eq!(
        cache.repo.commit(&Revision::default()).unwrap(),
        Some(commit(SECOND))
    );
}
