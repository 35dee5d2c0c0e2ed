//! List of the system calls that the sandboxes allow, generated from lines in the sources.
//!
//! The code that makes a call carries a line of this form:
//!
//! ```text
//! // #syscall WHO CALL[,CALL...] [CONDITION...]: why
//! ```
//!
//! * WHO: `all`, or some of `driver`, `frontend`, `uplink`, `disk`, `proxy`, `card`, `shield`, `daemon`, separated by commas.
//! * CALL: the name of a call; `name@x86_64` if only that architecture has it; `!name` for a call that
//!   libraries try and that is refused on purpose.
//! * CONDITION, on the low 32 bits of argument N (from 0): `N=VALUE`, `N=pid` (the process's own),
//!   `N+BITS` (has all), `N-BITS` (has none), `N&MASK=VALUE`; on all 64 bits: `N==0` (a null pointer).
//!   Values are numbers or names of libc; `|` combines bits.
//! * `// #syscall none: why` declares that a module makes its calls before a sandbox closes, or in none.
//!
//! `cargo xtask syscalls` writes the table ([`LIST`]). Findings are: a table that differs from the lines, lines
//! that cannot be parsed, conditions without effect because the same call is allowed without them, and modules
//! with calls but no line.

mod parse;
mod table;

use super::finding::Finding;
use super::tree::Tree;

/// Path of the generated file.
pub(crate) const LIST: &str = "crates/sandbox/src/isolation/list.rs";

/// Directories with code that runs in a sandbox. Of the product only parts do.
const CONFINED: [&str; 14] = [
    "crates/access/src/",
    "crates/block/src/",
    "crates/frame/src/",
    "crates/link/src/",
    "crates/memory/src/",
    "crates/nbd/src/",
    "crates/net/src/",
    "crates/platform/src/",
    "crates/switch/src/",
    "crates/sys/src/",
    "crates/uplink/src/",
    "crates/vhost-user/src/",
    "crates/xenbus/src/",
    "crates/xenstore/src/",
];

/// Returns the text of the generated file, and findings for the lines.
pub(super) fn generate(tree: &Tree) -> (String, Vec<Finding>) {
    let (rows, mut findings) = parse::all(tree);
    findings.extend(table::idle_conditions(&rows));
    (table::render(&rows), findings)
}

/// Returns findings for the lines and for the generated file.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let (wanted, mut findings) = generate(tree);
    findings.extend(silent_modules(tree));
    // A tree without any line needs no file.
    let found = tree.files.get(LIST);
    if found.map(String::as_str) != Some(&*wanted) && (found.is_some() || wanted.contains("on(")) {
        let message =
            "differs from the `#syscall` lines of the sources: run `cargo xtask syscalls`";
        findings.push(Finding::file(LIST, message));
    }
    findings
}

/// Returns findings for modules that make system calls and have no line.
fn silent_modules(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, source) in &tree.sources {
        if source.test_only || !CONFINED.iter().any(|room| path.starts_with(room)) {
            continue;
        }
        let product = || source.lines.iter().enumerate().filter(|(i, _)| !source.is_test(i + 1));
        if product().any(|(_, line)| parse::payload(line).is_some()) {
            continue;
        }
        if let Some((i, _)) = product().find(|(_, line)| makes_calls(line)) {
            let message =
                "makes system calls without a `// #syscall` line: name each call with its reason";
            findings.push(Finding::at(path, i + 1, message));
        }
    }
    findings
}

/// Returns `true` if a line of source names a function of rustix, imports a module of rustix with functions,
/// or calls the C library.
fn makes_calls(line: &str) -> bool {
    let line = line.trim_start();
    if line.starts_with("//") {
        return false;
    }
    // Imported names count at their import.
    let marks = if line.starts_with("use ") || line.starts_with("pub use ") { "(;,{" } else { "(" };
    ["rustix::", "libc::"].iter().any(|root| {
        let Some((_, rest)) = line.split_once(root) else { return false };
        let in_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        let (path, after) = rest.split_at(rest.find(|c| !in_path(c)).unwrap_or(rest.len()));
        let last = path.rsplit("::").find(|part| !part.is_empty()).unwrap_or_default();
        last.starts_with(|c: char| c.is_ascii_lowercase())
            && after.starts_with(|c| marks.contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(files: [(&str, &str); 2]) -> Vec<String> {
        let tree = Tree::from_files(files);
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn list_that_differs_from_lines_is_a_finding() {
        let text = "// #syscall all read: frames\nfn f() {}\n";
        let manifest = ("crates/net/Cargo.toml", "[package]\nname = \"x\"\n");
        let (list, wrong) =
            generate(&Tree::from_files([("crates/net/src/lib.rs", text), manifest]));
        assert_eq!(wrong, []);
        assert!(list.contains("libc::SYS_read"), "{list}");
        assert_eq!(findings([("crates/net/src/lib.rs", text), (LIST, &list)]), [] as [&str; 0]);
        let other = text.replace("read", "write");
        let stale = findings([("crates/net/src/lib.rs", &other), (LIST, &list)]);
        assert!(stale.iter().any(|f| f.contains("cargo xtask syscalls")), "{stale:?}");
        let lost = findings([("crates/net/src/lib.rs", text), manifest]);
        assert!(lost.iter().any(|f| f.contains("cargo xtask syscalls")), "{lost:?}");
    }

    #[test]
    fn module_with_calls_and_without_line_is_a_finding() {
        let manifest = ("crates/net/Cargo.toml", "[package]\nname = \"x\"\n");
        let silent = "fn f() {\n    rustix::io::read(a, b);\n}\n";
        for (path, text, count) in [
            ("crates/net/src/lib.rs", silent, 1),
            ("crates/wire/src/lib.rs", silent, 0),
            ("crates/net/src/lib.rs", "use rustix::io::{Errno, read};\n", 1),
            ("crates/net/src/lib.rs", "use rustix::event::epoll;\n", 1),
            ("crates/net/src/lib.rs", "fn f(e: rustix::io::Errno) {}\n", 0),
            ("crates/net/src/lib.rs", "fn f(e: *const libc::iovec, n: u32) {}\n", 0),
            ("crates/net/src/lib.rs", "use rustix::io::Errno;\n", 0),
            ("crates/net/src/lib.rs", "// rustix::io::read(a, b)\n", 0),
            ("crates/net/src/lib.rs", "#[cfg(test)]\nmod tests {\n use libc::read(1);\n}\n", 0),
            ("crates/net/src/lib.rs", "// #syscall none: never\nfn f() { libc::read(1); }\n", 0),
        ] {
            let found = silent_modules(&Tree::from_files([(path, text), manifest]));
            assert_eq!(found.len(), count, "{text}: {found:?}");
        }
    }
}
