//! The `ferrum` program. What it does is in the library, so that its compilation overlaps with that of the crates
//! before it: cargo starts a program only when all of them are done, a library as soon as their types are known.

use std::process::ExitCode;

fn main() -> ExitCode {
    ferrum::main()
}
