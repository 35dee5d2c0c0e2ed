//! Builds of the program for packages and archives.
//!
//! The bytes depend on the commit and the toolchain alone: the folders of the repository and of cargo are replaced in the program.
//! The builds have flags of their own, so the target directory has them beside those of `cargo build`.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use taskkit::exec::Cmd;

/// Target of the program, which selects dependencies.
pub(crate) const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Form of the program.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// With the libraries in it, and with the lines of the source, which go to the archive for debuggers.
    Static,
    /// With the libraries of the system.
    Dynamic,
}

impl Form {
    fn profile(self) -> &'static str {
        match self {
            Form::Static => "profiling",
            Form::Dynamic => "release",
        }
    }
}

/// Builds the program. Returns its path.
pub(crate) fn build(root: &Path, target: &Path, form: Form) -> anyhow::Result<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    let home = home.context("neither CARGO_HOME nor HOME is set")?;
    let prefixes = [(root, "/ringfence"), (&home, "/cargo")];
    // Encoded flags may contain blanks, which a path may have.
    let mut flags: Vec<String> = match form {
        Form::Static => vec!["-Ctarget-feature=+crt-static".to_owned()],
        Form::Dynamic => Vec::new(),
    };
    let mut c_flags = Vec::new();
    for (from, to) in prefixes {
        let from = from.to_str().context("a folder's name is not text")?;
        flags.push(format!("--remap-path-prefix={from}={to}"));
        // In words of a shell, as the crate cc takes them: a path may have blanks.
        let from = from.replace('\'', r"'\''");
        c_flags.push(format!("'-ffile-prefix-map={from}={to}'"));
    }
    let built = Cmd::cargo()
        .args(["build", "--locked", "--profile", form.profile(), "--target", TARGET])
        .args(["--package", "ringfence"])
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
        .env("CFLAGS", c_flags.join(" "))
        .env("CC_SHELL_ESCAPED_FLAGS", "1")
        .env("CARGO_TARGET_DIR", target)
        .run(root)?;
    anyhow::ensure!(built, "ringfence does not build for {TARGET}");
    Ok(target.join(TARGET).join(form.profile()).join("ringfence"))
}
