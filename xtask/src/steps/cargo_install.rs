//! Part `install` of the step `package`: `cargo install ringfence` from the packed crates, and uses of what it installed.
//!
//! A directory takes the place of the registry. It has the crates of others by `cargo vendor`, and the packed crates of the
//! workspace with their checksums. So the build has the sources, the profile and the lock file of a user of the registry.

use std::path::Path;
use std::time::Instant;

use anyhow::Context as _;
use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};
use taskkit::exec::Cmd;
use taskkit::text::duration;

use crate::context::{Context, Ended, outcome_of};
use crate::dist;
use crate::report::Outcome;

/// Arguments of the installed program, each of which must succeed.
const USES: [&[&str]; 4] =
    [&["--version"], &["run", "--", "ip", "addr"], &["demo"], &["completions", "bash"]];

/// Installs the program, and uses it.
pub(super) fn run(context: &Context) -> anyhow::Result<Ended> {
    let folder = context.target.join("install");
    if folder.exists() {
        std::fs::remove_dir_all(&folder)?;
    }
    let (packed, registry, prefix) =
        (folder.join("packed"), folder.join("registry"), folder.join("prefix"));
    std::fs::create_dir_all(&packed)?;
    let crates = dist::pack_crates(&context.root, &context.target, &packed)?;
    let vendor = Cmd::cargo().args(["vendor", "--quiet", "--locked", "--versioned-dirs"]);
    let vendored = vendor.args([&registry]).output(&context.root)?;
    vendored.map_err(|message| anyhow::anyhow!("cargo vendor: {message}"))?;
    for file in &crates {
        unpack(file, &registry)?;
    }
    let config = folder.join("config.toml");
    std::fs::write(&config, settings(&registry)?)?;
    let start = Instant::now();
    let installed = Cmd::cargo()
        .args(["install", "--locked", "ringfence", "--config"])
        .args([config.as_os_str(), "--root".as_ref(), prefix.as_os_str()])
        .env("CARGO_TARGET_DIR", folder.join("build"))
        .run(&folder)?;
    if !installed {
        return Ok(outcome_of(false, "cargo cannot install ringfence from its crates"));
    }
    let time = start.elapsed();
    let program = prefix.join("bin/ringfence");
    for arguments in USES {
        let used = Cmd::new(&program)
            .args(arguments.iter().copied())
            .run_to_file(&folder, &folder.join("use.log"))?;
        if used != 0 {
            let failure = format!("ringfence {} ended with status {used}", arguments.join(" "));
            println!("{}", std::fs::read_to_string(folder.join("use.log"))?);
            return Ok(outcome_of(false, &failure));
        }
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(Outcome::Passed(format!("cargo install took {}", duration(time))).into())
}

/// Unpacks a crate in a directory that cargo reads as a registry.
fn unpack(file: &Path, registry: &Path) -> anyhow::Result<()> {
    let unpacked = Cmd::new("tar")
        .args(["--extract".as_ref(), "--file".as_ref(), file.as_os_str()])
        .args(["--directory".as_ref(), registry.as_os_str()])
        .run(registry)?;
    anyhow::ensure!(unpacked, "{} cannot be unpacked", file.display());
    let name = file.file_stem().context("a crate has a name")?;
    let sum = HEXLOWER.encode(&Sha256::digest(std::fs::read(file)?));
    let checksum = format!("{{\"files\":{{}},\"package\":\"{sum}\"}}");
    std::fs::write(registry.join(name).join(".cargo-checksum.json"), checksum)?;
    Ok(())
}

/// Returns the settings of cargo with which a directory takes the place of the registry.
fn settings(registry: &Path) -> anyhow::Result<String> {
    let registry = registry.to_str().context("a folder's name is not text")?;
    let directory = toml::Value::from(registry);
    Ok(format!(
        "[source.crates-io]\nreplace-with = \"packed\"\n[source.packed]\ndirectory = {directory}\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_with_quotes_and_blanks_takes_the_place_of_the_registry() {
        let text = settings(Path::new("/a \"b\"")).unwrap();
        let table: toml::Table = text.parse().unwrap();
        assert_eq!(table["source"]["packed"]["directory"].as_str(), Some("/a \"b\""));
        assert_eq!(table["source"]["crates-io"]["replace-with"].as_str(), Some("packed"));
    }
}
