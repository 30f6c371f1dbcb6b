//! `ferrum licenses` and the lists that it prints, which are checked against Cargo.lock.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::{json, ok};
use std::collections::BTreeSet;

const LOCK: &str = include_str!("../../../Cargo.lock");
const PACKAGES: &str = include_str!("../src/licenses/packages.tsv");

/// Names and versions of the packages of Cargo.lock that come from a registry.
fn locked() -> BTreeSet<(String, String)> {
    let packages = LOCK.split("[[package]]").skip(1);
    let foreign = packages.filter(|package| package.contains("\nsource = "));
    let text = |package: &str, key: &str| {
        let mut lines = package.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "));
        value.unwrap().trim_matches('"').to_owned()
    };
    foreign
        .map(|package| (text(package, "name"), text(package, "version")))
        .collect()
}

#[test]
fn every_locked_package_has_its_licence_listed() {
    let rows = PACKAGES.lines().map(|line| {
        let fields: Vec<_> = line.split('\t').collect();
        let [name, version, licence, usage] = fields[..] else {
            panic!("found {line:?}, expected four fields");
        };
        assert!(!licence.is_empty(), "{name} {version}");
        assert!(["binary", "build", "page"].contains(&usage), "{line}");
        ((name.to_owned(), version.to_owned()), usage)
    });
    let listed: BTreeSet<_> = rows
        .filter(|(_, usage)| *usage != "page")
        .map(|(package, _)| package)
        .collect();
    let locked = locked();
    let missing: Vec<_> = locked.difference(&listed).collect();
    let gone: Vec<_> = listed.difference(&locked).collect();
    assert!(
        missing.is_empty() && gone.is_empty(),
        "missing: {missing:?}, no longer locked: {gone:?}; run python3 tools/licenses/make.py"
    );
}

#[test]
fn licences_are_listed_and_printed() {
    let list = ok(&["licenses"]);
    assert!(list.lines().any(|line| {
        line.split_whitespace().collect::<Vec<_>>() == ["highlight.js", "11.12.0", "BSD-3-Clause"]
    }));
    assert!(list.contains("MPL-2.0"), "{list}");
    // A library of tests is in no binary.
    assert!(!list.lines().any(|line| line.starts_with("insta ")));

    let json = json(&["licenses", "--json"]);
    let packages = json.as_array().unwrap();
    assert_eq!(packages.len(), list.lines().count());

    let texts = ok(&["licenses", "--full"]);
    assert!(texts.contains("Apache License") && texts.contains("Mozilla Public License"));
    // Whatever is listed has a text, or is said to have no file of one.
    for package in packages {
        let (name, version) = (
            package["name"].as_str().unwrap(),
            package["version"].as_str().unwrap(),
        );
        assert!(texts.contains(&format!("{name} {version}")), "{name}");
    }
}
