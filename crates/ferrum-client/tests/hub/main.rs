//! Pulling from a hub, well-behaved and not.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../support/mod.rs"]
mod support;

use ferrum_client::ClientError;
use ferrum_client::http::{Proxy, Timeouts, Url};
use ferrum_client::hub::{Hub, HubConfig, PullEvent, Pulled, Retries};
use ferrum_formats::hub::{Commit, DownloadScope, HubCache, ModelName, Revision};
use std::path::{Path, PathBuf};
use std::time::Duration;
use support::{FakeHub, commit, etag};
use tempfile::TempDir;

const REPO: &str = "org/model";

fn weights(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * 7 % 251) as u8).collect()
}

/// A hub with a folder of two shards and a GGUF file, and an empty cache.
struct Setup {
    hub: FakeHub,
    cache: TempDir,
    config: HubConfig,
    notes: Vec<String>,
}

const INDEX: &str = r#"{"weight_map": {"a": "m-00001.safetensors", "b": "m-00002.safetensors"}}"#;

impl Setup {
    fn new() -> Self {
        let hub = FakeHub::start();
        hub.add(
            REPO,
            "main",
            &commit('a'),
            &[
                ("README.md", b"words"),
                ("config.json", b"{}"),
                ("tokenizer.json", b"{\"t\": 1}"),
                ("model.safetensors.index.json", INDEX.as_bytes()),
                ("m-00001.safetensors", &weights(50_000)),
                ("m-00002.safetensors", &weights(70_000)),
                ("pytorch_model.bin", b"pickle"),
            ],
        );
        hub.add(
            "org/gguf",
            "main",
            &commit('b'),
            &[
                ("x-Q4_K_M.gguf", &weights(100_000)),
                ("sub/x y-Q8_0.gguf", &weights(90_000)),
            ],
        );
        let cache = tempfile::tempdir().unwrap();
        let second = Duration::from_secs(1);
        let config = HubConfig {
            endpoint: Url::parse(&hub.url()).unwrap(),
            token: None,
            cache: HubCache::new(cache.path()),
            timeouts: Timeouts {
                connect: 30 * second,
                response: 30 * second,
                read: 30 * second,
            },
            retries: Retries {
                attempts: 4,
                pause: Duration::from_millis(1),
            },
            proxy: Proxy::default(),
        };
        Self {
            hub,
            cache,
            config,
            notes: Vec::new(),
        }
    }

    fn pull_at(&mut self, name: &str, revision: &str) -> Result<Pulled, ClientError> {
        let hub = Hub::new(self.config.clone())?;
        let (name, revision) = (
            ModelName::parse(name).unwrap(),
            Revision::parse(revision).unwrap(),
        );
        hub.pull(&name, &revision, DownloadScope::Model, &mut |event| {
            if let PullEvent::Note(note) = event {
                self.notes.push(note);
            }
        })
    }

    fn pull(&mut self, name: &str) -> Result<Pulled, ClientError> {
        self.pull_at(name, "main")
    }

    fn fails(&mut self, name: &str) -> String {
        self.pull(name).unwrap_err().to_string()
    }

    fn find(&self, name: &str, revision: &str) -> Option<PathBuf> {
        let (name, revision) = (
            ModelName::parse(name).unwrap(),
            Revision::parse(revision).unwrap(),
        );
        let repo = self.config.cache.repo(&name.repo);
        repo.find(&name, &revision, DownloadScope::Model).unwrap()
    }

    fn incomplete(&self) -> PathBuf {
        let name = etag("x.gguf", &weights(100_000));
        self.cache
            .path()
            .join(format!("models--org--gguf/blobs/{name}.incomplete"))
    }
}

fn ranges(hub: &FakeHub) -> Vec<Option<String>> {
    let asked = hub.asked().into_iter().filter(|asked| asked.cdn);
    asked
        .map(|asked| asked.header("range").map(str::to_owned))
        .collect()
}

#[test]
fn a_folder_comes_whole_and_once() {
    let mut setup = Setup::new();
    let pulled = setup.pull(REPO).unwrap();
    assert_eq!(
        (pulled.commit.as_str(), pulled.fetched),
        (commit('a').as_str(), 5)
    );
    let read = |file: &str| std::fs::read(pulled.path.join(file)).unwrap();
    assert_eq!(read("config.json"), b"{}");
    assert_eq!(read("m-00002.safetensors"), weights(70_000));
    for unwanted in ["README.md", "pytorch_model.bin"] {
        assert!(!pulled.path.join(unwanted).exists());
    }
    let root = setup.cache.path().join("models--org--model");
    assert_eq!(
        std::fs::read_to_string(root.join("refs/main")).unwrap(),
        commit('a')
    );
    let blob = root.join("blobs").join(etag("config.json", b"{}"));
    assert_eq!(std::fs::read(&blob).unwrap(), b"{}");
    assert_eq!(
        pulled.path.join("config.json").canonicalize().unwrap(),
        blob.canonicalize().unwrap()
    );
    assert_eq!(setup.find(REPO, "main"), Some(pulled.path));
    assert!(setup.notes.is_empty());
    // Asked again, there is nothing left to fetch.
    setup.hub.asked();
    assert_eq!(setup.pull(REPO).unwrap().fetched, 0);
    assert_eq!(setup.hub.asked().len(), 1);
}

#[test]
fn a_file_is_named_by_its_path_or_its_end() {
    let mut setup = Setup::new();
    let usual = setup.pull("org/gguf").unwrap();
    assert!(usual.path.ends_with("x-Q4_K_M.gguf"));
    let named = setup.pull("org/gguf:q8_0").unwrap();
    assert!(named.path.ends_with("sub/x y-Q8_0.gguf"));
    assert_eq!(std::fs::read(named.path).unwrap(), weights(90_000));
    assert!(
        setup
            .fails("org/gguf:Q2_K")
            .contains("has no file \"Q2_K\"\nhint: there are: ")
    );
}

#[test]
fn a_split_file_comes_with_its_parts() {
    let mut setup = Setup::new();
    let parts = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"];
    let files = [(parts[0], &b"one"[..]), (parts[1], b"two")];
    setup.hub.add("org/split", "main", &commit('d'), &files);
    let pulled = setup.pull("org/split").unwrap();
    assert!(pulled.path.ends_with(parts[0]) && pulled.fetched == 2);
    assert!(pulled.path.with_file_name(parts[1]).exists());
    // One part is not the model.
    std::fs::remove_file(pulled.path.with_file_name(parts[1])).unwrap();
    assert_eq!(setup.find("org/split", "main"), None);
}

#[test]
fn only_the_tokenizer_comes_without_weights() {
    let setup = Setup::new();
    let hub = Hub::new(setup.config.clone()).unwrap();
    let name = ModelName::parse(REPO).unwrap();
    let pulled = hub
        .pull(
            &name,
            &Revision::default(),
            DownloadScope::Tokenizer,
            &mut |_| (),
        )
        .unwrap();
    assert!(pulled.path.join("tokenizer.json").exists());
    assert_eq!(pulled.fetched, 2);
    assert_eq!(setup.find(REPO, "main"), None);
}

#[test]
fn a_cut_download_goes_on_where_it_ended() {
    let mut setup = Setup::new();
    setup.hub.faults(|faults| faults.cut = (30_000, 2));
    let pulled = setup.pull("org/gguf").unwrap();
    assert_eq!(std::fs::read(pulled.path).unwrap(), weights(100_000));
    let from = |n: usize| Some(format!("bytes={n}-"));
    assert_eq!(ranges(&setup.hub), [None, from(30_000), from(60_000)]);
}

#[test]
fn the_next_pull_goes_on_where_the_last_one_gave_up() {
    let mut setup = Setup::new();
    setup.config.retries.attempts = 1;
    setup.hub.faults(|faults| faults.cut = (30_000, 1));
    let error = setup.fails("org/gguf");
    assert!(
        error.contains("/cdn/org/gguf/") && !error.contains("Signature"),
        "{error}"
    );
    assert_eq!(std::fs::metadata(setup.incomplete()).unwrap().len(), 30_000);
    assert_eq!(setup.find("org/gguf", "main"), None);
    assert!(
        !setup
            .cache
            .path()
            .join("models--org--gguf/refs/main")
            .exists()
    );
    setup.hub.asked();
    setup.pull("org/gguf").unwrap();
    assert_eq!(ranges(&setup.hub), [Some("bytes=30000-".to_owned())]);
    assert!(!setup.incomplete().exists());
}

#[test]
fn what_was_left_may_be_wrong_or_too_long_or_all() {
    for (left, fetched) in [
        (vec![0; 40_000], vec![Some("bytes=40000-".to_owned()), None]),
        (vec![0; 100_001], vec![None]),
        (weights(100_000), vec![]),
    ] {
        let mut setup = Setup::new();
        let path = setup.incomplete();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, left).unwrap();
        let pulled = setup.pull("org/gguf").unwrap();
        assert_eq!(std::fs::read(pulled.path).unwrap(), weights(100_000));
        assert_eq!(ranges(&setup.hub), fetched);
    }
    // A link in its place would make another file grow.
    #[cfg(unix)]
    {
        let mut setup = Setup::new();
        let path = setup.incomplete();
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(setup.cache.path().join("victim"), &path).unwrap();
        assert!(setup.fails("org/gguf").contains("it is no plain file"));
        assert!(!setup.cache.path().join("victim").exists());
    }
}

#[test]
fn a_server_without_parts_sends_all_again() {
    let mut setup = Setup::new();
    setup.hub.faults(|faults| {
        faults.cut = (30_000, 1);
        faults.ignore_range = true;
    });
    let pulled = setup.pull("org/gguf").unwrap();
    assert_eq!(std::fs::read(pulled.path).unwrap(), weights(100_000));
}

#[test]
fn wrong_bytes_are_not_kept() {
    for (name, kind) in [("org/gguf", "blobs"), (REPO, "blobs")] {
        let mut setup = Setup::new();
        setup.hub.faults(|faults| faults.corrupt = 100);
        let error = setup.fails(name);
        assert!(
            error.contains("checksum: found ") && error.contains("hint: "),
            "{error}"
        );
        let folder = setup
            .cache
            .path()
            .join(format!("models--{}", name.replace('/', "--")));
        assert_eq!(std::fs::read_dir(folder.join(kind)).unwrap().count(), 0);
        assert!(!folder.join("snapshots").exists());
        setup.hub.faults(|faults| faults.corrupt = 0);
        setup.pull(name).unwrap();
    }
}

#[test]
fn a_busy_hub_is_asked_again_and_a_dead_one_named() {
    let mut setup = Setup::new();
    setup.hub.faults(|faults| faults.unavailable = 3);
    setup.pull("org/gguf").unwrap();
    setup.hub.faults(|faults| faults.unavailable = 100);
    let error = setup.fails(REPO);
    assert!(
        error.contains("has a problem (status 503)\nhint: try again later"),
        "{error}"
    );
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    setup.config.endpoint = Url::parse(&format!("http://{free}")).unwrap();
    let error = setup.fails(REPO);
    assert!(
        error.contains(&format!("http://{free}/api/models/org/model")),
        "{error}"
    );
}

#[test]
fn a_server_that_stalls_is_left() {
    let mut setup = Setup::new();
    setup.config.timeouts.read = Duration::from_millis(300);
    setup.hub.faults(|faults| faults.stall = 1);
    let pulled = setup.pull("org/gguf").unwrap();
    assert_eq!(std::fs::read(pulled.path).unwrap(), weights(100_000));
}

#[test]
fn the_token_stays_with_the_hub() {
    let mut setup = Setup::new();
    setup.hub.gate("org/gguf", "hf_secret");
    let error = setup.fails("org/gguf");
    assert!(
        error.contains("accepted its terms\nhint: accept them at http://127.0.0.1"),
        "{error}"
    );
    assert!(error.contains("set HF_TOKEN"), "{error}");
    setup.config.token = Some("wrong".into());
    assert!(setup.fails("org/gguf").contains("check the token"));
    setup.config.token = Some("hf_secret".into());
    setup.hub.asked();
    setup.pull("org/gguf").unwrap();
    let asked = setup.hub.asked();
    assert!(asked.iter().any(|asked| asked.cdn));
    for asked in asked {
        let token = asked.header("authorization");
        assert_eq!(token.is_some(), !asked.cdn, "{asked:?}");
    }
    setup.config.token = Some("a\nb".into());
    assert!(
        setup
            .fails("org/gguf")
            .contains("characters that no token has")
    );
    // Where others can listen, it is not said at all.
    setup.config.token = Some("hf_secret".into());
    setup.config.endpoint = Url::parse("http://hub.invalid").unwrap();
    setup.config.retries.attempts = 1;
    setup.fails("org/gguf");
    assert!(setup.notes[0].contains("the token is not sent to hub.invalid"));
}

#[test]
fn redirects_have_an_end() {
    let mut setup = Setup::new();
    for (to, words) in [
        ("/again", "more than 10 redirects"),
        ("file:///etc/passwd", "no usable address"),
        ("http://", "no usable address"),
    ] {
        setup.hub.faults(|faults| faults.redirect = Some(to.into()));
        let error = setup.fails(REPO);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_commit_can_be_pinned() {
    let mut setup = Setup::new();
    let new = weights(1000);
    setup
        .hub
        .add("org/gguf", "main", &commit('c'), &[("x-Q4_K_M.gguf", &new)]);
    setup
        .hub
        .add("org/gguf", "refs/pr/7", &commit('d'), &[("y.gguf", b"y")]);
    let old = setup.pull_at("org/gguf", &commit('b')).unwrap();
    assert_eq!(std::fs::metadata(&old.path).unwrap().len(), 100_000);
    assert!(!setup.cache.path().join("models--org--gguf/refs").exists());
    assert_eq!(setup.find("org/gguf", &commit('b')), Some(old.path));
    let main = setup.pull("org/gguf").unwrap();
    assert_eq!(std::fs::read(main.path).unwrap(), new);
    let pr = setup.pull_at("org/gguf", "refs/pr/7").unwrap();
    assert!(pr.path.ends_with("y.gguf"));
    assert!(setup.find("org/gguf", "refs/pr/7").is_some());
    let error = setup.pull_at("org/gguf", "v9").unwrap_err().to_string();
    assert!(
        error.contains("has no revision \"v9\"\nhint: check --revision"),
        "{error}"
    );
    let error = setup.fails("org/nothing");
    assert!(error.contains("has no model org/nothing"), "{error}");
}

#[test]
fn what_two_commits_share_comes_once() {
    let mut setup = Setup::new();
    let same = weights(100_000);
    setup.pull("org/gguf").unwrap();
    setup.hub.add(
        "org/gguf",
        "main",
        &commit('c'),
        &[("renamed-Q4_K_M.gguf", &same)],
    );
    setup.hub.asked();
    let pulled = setup.pull("org/gguf").unwrap();
    assert_eq!(pulled.fetched, 0);
    assert_eq!(ranges(&setup.hub), []);
    assert_eq!(std::fs::read(pulled.path).unwrap(), same);
}

#[test]
fn several_at_once_fetch_once() {
    let setup = Setup::new();
    setup
        .hub
        .faults(|faults| faults.delay = Duration::from_millis(100));
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let config = setup.config.clone();
                scope.spawn(move || {
                    let name = ModelName::parse("org/gguf").unwrap();
                    let hub = Hub::new(config).unwrap();
                    hub.pull(
                        &name,
                        &Revision::default(),
                        DownloadScope::Model,
                        &mut |_| (),
                    )
                    .unwrap()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(
        results.iter().map(|pulled| pulled.fetched).sum::<usize>(),
        1
    );
    assert_eq!(ranges(&setup.hub), [None]);
    for pulled in results {
        assert_eq!(std::fs::read(pulled.path).unwrap(), weights(100_000));
    }
}

#[test]
fn hostile_listings_are_refused() {
    let mut setup = Setup::new();
    let sha = commit('a');
    let long = format!(
        "{{\"sha\": \"{sha}\", \"x\": \"{}\"}}",
        "x".repeat(33 << 20)
    );
    let many = "{\"rfilename\": \"a\"},".repeat(100_001);
    let many = format!(
        "{{\"sha\": \"{sha}\", \"siblings\": [{}]}}",
        many.trim_end_matches(',')
    );
    let deep = "[".repeat(100_000);
    for (listing, words) in [
        ("", "describes no model"),
        ("{}", "describes no model"),
        ("[1]", "describes no model"),
        (deep.as_str(), "describes no model"),
        (
            r#"{"sha": "../../x", "siblings": []}"#,
            "\"../../x\" is no commit",
        ),
        (r#"{"sha": "main"}"#, "is no commit"),
        (long.as_str(), "is longer than"),
        (many.as_str(), "100001 files, the limit is 100000"),
    ] {
        setup
            .hub
            .faults(|faults| faults.listing = Some(listing.into()));
        let error = setup.fails(REPO);
        assert!(error.contains(words), "{error:.200}");
    }
    let names = [
        "../../../evil.gguf",
        "/etc/evil.gguf",
        "a/../../evil.gguf",
        "C:evil.gguf",
        "a\\\\b.gguf",
    ];
    let siblings: Vec<_> = names
        .iter()
        .map(|name| format!("{{\"rfilename\": \"{name}\"}}"))
        .collect();
    let listing = format!(
        "{{\"sha\": \"{sha}\", \"siblings\": [{}]}}",
        siblings.join(",")
    );
    setup.hub.faults(|faults| faults.listing = Some(listing));
    let error = setup.fails(REPO);
    assert!(
        error.contains("holds neither safetensors nor GGUF"),
        "{error}"
    );
    assert_eq!(setup.notes, ["5 files of org/model have impossible names"]);
    assert_eq!(std::fs::read_dir(setup.cache.path()).unwrap().count(), 0);
}

#[test]
fn hostile_heads_are_refused() {
    let name = etag("x.gguf", &weights(100_000));
    let linked = |etag: &str, size: &str| {
        vec![
            ("Location", "http://127.0.0.1:1/x".to_owned()),
            ("X-Linked-Etag", etag.to_owned()),
            ("X-Linked-Size", size.to_owned()),
        ]
    };
    let mut other_commit = linked(&name, "100000");
    other_commit.push(("X-Repo-Commit", commit('f')));
    for (head, words) in [
        (linked("\"../../evil\"", "1"), "is no usable ETag"),
        (linked("", "1"), "is no usable ETag"),
        (
            vec![("Location", "http://127.0.0.1:1/x".to_owned())],
            "has no ETag",
        ),
        (
            linked(&name, "99999999999999"),
            "size in bytes is 99999999999999",
        ),
        (
            linked(&name, "10"),
            "size in bytes: found more, expected 10",
        ),
        (other_commit, "found commit"),
    ] {
        let mut setup = Setup::new();
        setup.hub.faults(|faults| faults.head = Some(head));
        let error = setup.fails("org/gguf");
        assert!(error.contains(words), "{words}: {error}");
        assert_eq!(setup.find("org/gguf", "main"), None);
    }
    // A mirror may have names that say nothing about the contents; a note says so.
    let mut setup = Setup::new();
    setup
        .hub
        .faults(|faults| faults.head = Some(linked("weak-123", "100000")));
    setup.pull("org/gguf").unwrap();
    assert!(
        setup.notes[0].contains("no checksum for x-Q4_K_M.gguf"),
        "{:?}",
        setup.notes
    );
}

#[test]
fn an_index_cannot_name_what_is_not_there() {
    let mut setup = Setup::new();
    for (shard, words) in [
        (
            "../../../etc/passwd",
            "the name of a file inside the folder",
        ),
        ("m-00003.safetensors", "expected a file of the repository"),
    ] {
        let index = format!("{{\"weight_map\": {{\"a\": \"{shard}\"}}}}");
        setup.hub.add(
            "org/bad",
            "main",
            &commit('e'),
            &[
                ("config.json", b"{}"),
                ("model.safetensors.index.json", index.as_bytes()),
                ("m-00001.safetensors", b"1"),
            ],
        );
        let error = setup.fails("org/bad");
        assert!(error.contains(words), "{error}");
        std::fs::remove_dir_all(setup.cache.path().join("models--org--bad")).unwrap();
    }
}

#[test]
fn progress_is_told_in_order() {
    let setup = Setup::new();
    let hub = Hub::new(setup.config.clone()).unwrap();
    let mut last = None;
    let mut ends = 0;
    let name = ModelName::parse("org/gguf").unwrap();
    hub.pull(
        &name,
        &Revision::default(),
        DownloadScope::Model,
        &mut |event| match event {
            PullEvent::Begin { file, total, done } => {
                assert_eq!((file, total, done), ("x-Q4_K_M.gguf", Some(100_000), 0));
            }
            PullEvent::Progress(done) => {
                assert!(last.is_none_or(|last| last < done));
                last = Some(done);
            }
            PullEvent::End => ends += 1,
            PullEvent::Note(note) => panic!("{note}"),
        },
    )
    .unwrap();
    assert_eq!((last, ends), (Some(100_000), 1));
    let commit = Commit::parse(&commit('b')).unwrap();
    let repo = setup.config.cache.repo(&name.repo);
    assert!(
        repo.snapshot(&commit)
            .starts_with(Path::new(setup.cache.path()))
    );
}
