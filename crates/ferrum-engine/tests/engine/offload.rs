//! Blocks that leave the device and come back: the same answers, by whatever way, also after a restart, and with
//! files that are damaged or of another model.

use crate::invariance::{ROOMY, assert_same, session, start};
use crate::naive::tokens;
use crate::states::{self, hybrid};
use crate::windows::{GROUPED, windowed};
use crate::{Answered, collect, demo, encode, greedy};
use ferrum_engine::{
    Engine, EngineConfig, EngineOffload, KvOffload, OffloadConfig, OffloadStats, Request,
};
use ferrum_models::{Model, RunnerConfig};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Room for two of the prompts below, not for all.
const TIGHT: RunnerConfig = RunnerConfig {
    kv_tokens: 2 * 112,
    max_seqs: 2,
    ..ROOMY
};

const PATIENCE: Duration = Duration::from_secs(60);

fn store(ram_bytes: u64, dir: Option<&Path>) -> KvOffload {
    let config = OffloadConfig {
        ram_bytes,
        dir: dir.map(Path::to_owned),
        dir_bytes: Some(1 << 30),
    };
    KvOffload::open(&config).unwrap()
}

fn engine(config: RunnerConfig, model: &str, store: Option<&KvOffload>) -> Engine {
    let offload = store.map(|store| EngineOffload {
        store: store.clone(),
        model: model.to_owned(),
    });
    let settings = EngineConfig {
        offload,
        pool_check_interval: Duration::ZERO,
        ..EngineConfig::default()
    };
    start(&demo(), config, settings)
}

/// Prompts with beginnings of their own, longer than a block.
fn requests() -> Vec<Request> {
    let names = ["Fox", "Bear", "Owl", "Hare", "Mole"];
    let prompt = |name: &str| {
        let text = format!("{name} was a little animal who lived in the forest. ");
        encode(&text.repeat(4))
    };
    let requests = names.iter().map(|name| {
        let prompt = prompt(name);
        assert!((40..100).contains(&prompt.len()), "{}", prompt.len());
        greedy(&prompt, 8)
    });
    requests.collect()
}

fn ask(engine: &Engine, requests: &[Request]) -> Vec<Answered> {
    let one = |request: &Request| collect(engine.handle().submit(request.clone()).unwrap());
    requests.iter().map(one).collect()
}

fn cached(answers: &[Answered]) -> usize {
    let usage = answers.iter().map(|answer| answer.usage.unwrap());
    usage.map(|usage| usage.cached_tokens).sum()
}

fn stats(engine: &Engine) -> OffloadStats {
    engine.handle().stats().offload
}

/// What a roomy engine without anything else says.
fn expected() -> Vec<Answered> {
    ask(&engine(ROOMY, "demo", None), &requests())
}

#[test]
fn what_left_the_device_comes_back_from_ram() {
    let store = store(1 << 30, None);
    let engine = engine(TIGHT, "demo", Some(&store));
    let requests = requests();
    let first = ask(&engine, &requests);
    assert_same(&first, &expected(), "with RAM");
    assert!(stats(&engine).ram_bytes > 0, "{:?}", stats(&engine));
    let again = ask(&engine, &requests);
    assert_same(&again, &first, "again");
    let stats = stats(&engine);
    assert!(
        stats.ram_hit_tokens > 0 && stats.disk_hit_tokens == 0,
        "{stats:?}"
    );
    let whole: usize = requests.iter().map(|r| (r.prompt.len() - 1) / 8 * 8).sum();
    assert_eq!(cached(&again), whole);
    // Many at once, for whom there is not enough room.
    let submit = |request: &Request| engine.handle().submit(request.clone()).unwrap();
    let streams: Vec<_> = requests.iter().chain(&requests).map(submit).collect();
    let answers: Vec<_> = streams.into_iter().map(collect).collect();
    assert_same(&answers, &[first.clone(), first].concat(), "at once");
}

#[test]
fn ram_has_a_limit_and_what_leaves_it_goes_to_the_disk() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(200 << 10, Some(dir.path()));
    let engine = engine(TIGHT, "demo", Some(&store));
    let requests = requests();
    let first = ask(&engine, &requests);
    let again = ask(&engine, &requests);
    assert_same(&again, &first, "again");
    let stats = stats(&engine);
    assert!(stats.ram_bytes <= 200 << 10, "{stats:?}");
    assert!(stats.ram_evictions > 0 && stats.disk_bytes > 0, "{stats:?}");
}

#[test]
fn tenants_share_nothing_outside_of_the_device_either() {
    let store = store(1 << 30, None);
    let engine = engine(TIGHT, "demo", Some(&store));
    let of = |tenant: &str| {
        let mut requests = requests();
        for request in &mut requests {
            request.tenant = Some(tenant.to_owned());
        }
        requests
    };
    let first = ask(&engine, &of("a"));
    assert_eq!(cached(&ask(&engine, &of("b"))), 0);
    let again = ask(&engine, &of("a"));
    assert_same(&again, &first, "again");
    assert!(cached(&again) > 0);
}

/// The outputs of an engine that starts with a folder, and its offload statistics.
fn restarted(dir: &Path, model: &str, ram: u64) -> (Vec<Answered>, OffloadStats) {
    let store = store(ram, Some(dir));
    let engine = engine(TIGHT, model, Some(&store));
    let answers = ask(&engine, &requests());
    let found = stats(&engine);
    engine.shutdown();
    store.finish(PATIENCE);
    (answers, found)
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    all.filter(|path| path.extension().is_some_and(|e| e == "kv"))
        .collect()
}

#[test]
fn a_restart_goes_on_from_the_disk() {
    for ram in [0, 1 << 30] {
        let dir = tempfile::tempdir().unwrap();
        let (first, found) = restarted(dir.path(), "demo", ram);
        assert_eq!(found.disk_hit_tokens, 0);
        assert!(!files(dir.path()).is_empty());
        let (again, found) = restarted(dir.path(), "demo", ram);
        assert_same(&again, &first, "after a restart");
        let whole: usize = requests()
            .iter()
            .map(|r| (r.prompt.len() - 1) / 8 * 8)
            .sum();
        assert_eq!(found.disk_hit_tokens, whole as u64, "{found:?}");
        assert_eq!(cached(&again), whole);
    }
}

#[test]
fn another_model_uses_nothing_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = restarted(dir.path(), "demo", 0);
    let (other, found) = restarted(dir.path(), "another", 0);
    assert_same(&other, &first, "with another identity");
    assert_eq!((found.disk_hit_tokens, found.damaged), (0, 0), "{found:?}");
    assert_eq!(cached(&other), 0);
}

#[test]
fn damaged_files_are_removed_and_computed_anew() {
    let dir = tempfile::tempdir().unwrap();
    let (first, _) = restarted(dir.path(), "demo", 0);
    let written = files(dir.path());
    for (index, path) in written.iter().enumerate() {
        let mut bytes = std::fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        match index % 3 {
            0 => bytes[middle] ^= 1,
            1 => bytes.truncate(middle),
            _ => bytes.clear(),
        }
        std::fs::write(path, bytes).unwrap();
    }
    let (again, found) = restarted(dir.path(), "demo", 0);
    assert_same(&again, &first, "with damaged files");
    assert_eq!(found.disk_hit_tokens, 0, "{found:?}");
    assert!(found.damaged >= requests().len() as u64, "{found:?}");
    // Blocks that were computed again are in the folder at the next start.
    let (third, found) = restarted(dir.path(), "demo", 0);
    assert_same(&third, &first, "after the damage");
    assert!(found.disk_hit_tokens > 0, "{found:?}");
}

/// Runs requests twice on an engine with room for two prompts. Returns the tokens restored from RAM and from disk.
fn twice(model: &Model, config: RunnerConfig, requests: &[Request], store: &KvOffload) -> [u64; 2] {
    let alone = Engine::start(
        session(model, config).into_runner(),
        None,
        EngineConfig::default(),
    );
    let expected = ask(&alone.unwrap(), requests);
    let settings = EngineConfig {
        offload: Some(EngineOffload {
            store: store.clone(),
            model: "model".into(),
        }),
        pool_check_interval: Duration::ZERO,
        state_checkpoint_interval: 16,
        ..EngineConfig::default()
    };
    let tight = RunnerConfig {
        kv_tokens: 2 * 112,
        max_seqs: 2,
        kept_states: config.kept_states.min(1),
        ..config
    };
    let runner = session(model, tight).into_runner();
    let engine = Engine::start(runner, None, settings).unwrap();
    for round in ["first", "again"] {
        let what = format!("{} groups, {round}", config.cache_groups(&model.spec).len());
        assert_same(&ask(&engine, requests), &expected, &what);
    }
    let found = stats(&engine);
    engine.shutdown();
    store.finish(PATIENCE);
    [found.ram_hit_tokens, found.disk_hit_tokens]
}

#[test]
fn windows_and_states_come_back_too() {
    let dir = tempfile::tempdir().unwrap();
    let text = tokens(100);
    let of_hybrid = (0..5).map(|i| greedy(&[&[i + 1], &text[..60 + i as usize]].concat(), 8));
    let of_hybrid: Vec<_> = of_hybrid.collect();
    let subjects = [
        (
            windowed(&[None, Some(20), Some(9)]),
            GROUPED,
            self::requests(),
        ),
        (windowed(&[Some(13)]), GROUPED, self::requests()),
        (hybrid(&dir), states::CONFIG, of_hybrid),
    ];
    for (model, config, requests) in &subjects {
        let files = tempfile::tempdir().unwrap();
        let [ram, _] = twice(model, *config, requests, &store(1 << 30, None));
        assert!(ram > 50, "{ram}");
        // How much is on the disk by the second round depends on the disk; the answers do not.
        twice(model, *config, requests, &store(0, Some(files.path())));
        // After a restart, and with damaged files, whose tokens are computed again.
        let [_, disk] = twice(model, *config, requests, &store(0, Some(files.path())));
        assert!(disk > 50, "{disk}");
        for (i, path) in self::files(files.path()).iter().enumerate() {
            if i.is_multiple_of(3) {
                let mut bytes = std::fs::read(path).unwrap();
                let middle = bytes.len() / 2;
                bytes[middle] ^= 1;
                std::fs::write(path, bytes).unwrap();
            }
        }
        twice(model, *config, requests, &store(0, Some(files.path())));
    }
}

#[test]
fn without_a_prefix_cache_nothing_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let store = store(1 << 30, Some(dir.path()));
    let offload = EngineOffload {
        store: store.clone(),
        model: "demo".into(),
    };
    let settings = EngineConfig {
        offload: Some(offload),
        prefix_cache: false,
        ..EngineConfig::default()
    };
    let engine = start(&demo(), TIGHT, settings);
    let answers = ask(&engine, &requests());
    assert_same(&answers, &expected(), "without a prefix cache");
    engine.shutdown();
    store.finish(PATIENCE);
    assert!(files(dir.path()).is_empty());
}
