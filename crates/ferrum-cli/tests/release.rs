//! The archive that `tools/release/build.sh` makes of a program.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod command;

use command::root;
use ferrum_test_support::skip;
use std::process::Command;

#[test]
fn an_archive_holds_the_program_its_licences_completions_and_manual_pages() {
    let there = |tool: &str| Command::new(tool).arg("--version").output().is_ok();
    if let Some(tool) = ["strip", "tar", "gzip", "sha256sum"]
        .iter()
        .find(|tool| !there(tool))
    {
        skip(format_args!("there is no {tool}"));
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let make = Command::new(root().join("tools/release/build.sh"))
        .args(["--binary", env!("CARGO_BIN_EXE_ferrum"), "--out"])
        .arg(out.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&make.stderr);
    assert!(make.status.success(), "{said}");
    let archive = String::from_utf8(make.stdout).unwrap();
    let archive = archive.trim_end();
    assert!(archive.contains(&format!("ferrum-{}-", env!("CARGO_PKG_VERSION"))));

    let check = Command::new("sha256sum")
        .args(["--check", "--quiet", &format!("{archive}.sha256")])
        .current_dir(out.path())
        .status();
    assert!(check.unwrap().success());

    let list = Command::new("tar")
        .args(["-tzf", archive])
        .output()
        .unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    let (folder, _) = list.split_once('/').unwrap();
    for file in [
        "ferrum",
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "THIRD-PARTY-LICENSES.txt",
        "completions/ferrum.bash",
        "completions/_ferrum",
        "completions/ferrum.fish",
        "man/ferrum.1",
        "man/ferrum-run.1",
    ] {
        let path = format!("{folder}/{file}");
        assert!(list.lines().any(|line| line == path), "{path}: {list}");
    }
}
