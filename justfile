# Every routine of the project. `just` lists them.

default:
    @just --list

# Formatting, lints and docs, as CI has them
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets -- -D warnings
    cargo check --manifest-path fuzz/Cargo.toml --target-dir target --features engine
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

# All tests
test:
    cargo test --workspace

# Clients of the server, each a script: needs Python's `openai`, `anthropic` and `playwright` and the npm packages of
# Claude Code and Codex CLI, or skips what lacks
clients:
    cargo build --release
    cargo build --release --package ferrum-server --example scripted
    python tools/clients/run.py target/release/ferrum

# Speed of a model (default: the demo model) beside this machine's limits
bench *ARGS:
    cargo run --release -- bench {{ARGS}}

# Every op of a backend against its meaning
conformance BACKEND="cpu":
    cargo run --release -- verify ops --backend {{BACKEND}}

# A report of a GPU into docs/reports: KIND is conformance, parity, bench (with models) or sanitizer
report KIND *ARGS:
    cargo build --release
    python tools/device/report.py {{KIND}} {{ARGS}}

# Tests on emulated processors: KIND is `arm` or `x86`, ARGS are cargo's (see tools/emulate/README.md)
emulate KIND *ARGS:
    tools/emulate/{{KIND}}.sh {{ARGS}}

# Make the test fixtures anew (needs the packages of tools/fixtures/requirements.txt)
fixtures:
    python tools/fixtures/make_models.py
    python tools/fixtures/make_tokenizers.py
    python tools/fixtures/make_templates.py
    python tools/fixtures/make_quant.py

# The list of third-party code that `ferrum licenses` prints, after a change of Cargo.lock
licenses:
    python3 tools/licenses/make.py

# Licences, duplicates, sources and advisories of dependencies (needs cargo-deny)
deny:
    cargo deny check

# Spelling, with the exceptions of _typos.toml (needs typos)
typos:
    typos

# An archive of the program, with its licences, completions and manual pages (tools/release/build.sh --help)
release *ARGS:
    tools/release/build.sh {{ARGS}}

# Fuzz a parser for some seconds (needs cargo-fuzz and a nightly toolchain); SANITIZER may be `none`, which is faster
fuzz TARGET SECONDS="60" SANITIZER="address":
    tools/fuzz.sh {{TARGET}} {{SECONDS}} {{SANITIZER}}

# The hand-over between the engine's thread and its handles in many orders
shuttle:
    cargo test --workspace --features ferrum-engine/shuttle --test shuttle

# Unsafe code of the thread pool and the encoders under Miri: WHAT is `pool`, `quant` or nothing for both
miri *WHAT:
    tools/miri.sh {{WHAT}}
