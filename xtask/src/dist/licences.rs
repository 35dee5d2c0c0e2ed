//! Licences of the crates in the program: the texts that each crate's folder has. A text that several crates share is printed
//! once.

use std::collections::BTreeMap;
use std::path::Path;

use super::dependencies::Component;

/// Beginnings of the names of files with a licence or a notice, in capitals.
const NAMES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "NOTICE", "UNLICENSE"];
const LINE: &str =
    "--------------------------------------------------------------------------------";

/// Text about the C library in a static program.
const GLIBC: &str = "\
The program contains the GNU C Library (glibc), licence LGPL-2.1-or-later, whose sources are at
https://www.gnu.org/software/libc/. To link the program with another version of it, build Ringfence from its sources:
cargo xtask dist.";

/// Returns the list of foreign crates and all texts.
///
/// # Errors
///
/// Fails if a folder cannot be read, and for a crate of which neither the expression nor a text is known.
pub(super) fn collect(components: &[Component], glibc: Option<&str>) -> anyhow::Result<String> {
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for component in components.iter().filter(|one| one.is_foreign()) {
        let title = format!("{} {}", component.name, component.version);
        let found = texts_in(&component.folder)?;
        let licence = component.licence.as_deref();
        anyhow::ensure!(licence.is_some() || !found.is_empty(), "{title} has no licence");
        let note = if found.is_empty() { " (the crate has no file with the text)" } else { "" };
        list.push_str(&format!("{title}: {}{note}\n", licence.unwrap_or("see its text")));
        for text in found {
            texts.entry(text).or_default().push(title.clone());
        }
    }
    // In the order of the first crate of each.
    let mut texts: Vec<(Vec<String>, String)> =
        texts.into_iter().map(|(text, titles)| (titles, text)).collect();
    texts.sort();
    let mut all = format!(
        "Crates in the program ringfence, from https://crates.io/, with their licences. Of alternatives (\"OR\"), each \
         may be chosen.\n\n{list}"
    );
    if glibc.is_some() {
        all.push_str(&format!("\n{GLIBC}\n"));
    }
    for (titles, text) in texts {
        all.push_str(&format!("\n{LINE}\n{}\n{LINE}\n\n{}\n", titles.join("\n"), text.trim_end()));
    }
    Ok(all)
}

/// Returns the texts in the folder of a crate, in the order of their names.
fn texts_in(folder: &Path) -> anyhow::Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().to_ascii_uppercase();
        if entry.file_type()?.is_file() && NAMES.iter().any(|start| name.starts_with(start)) {
            files.push(entry.path());
        }
    }
    files.sort();
    let read = |file: &std::path::PathBuf| {
        let bytes = std::fs::read(file)?;
        Ok(String::from_utf8_lossy(&bytes).replace("\r\n", "\n"))
    };
    files.iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::super::dependencies::tests::example;
    use super::*;

    #[test]
    fn text_that_two_crates_share_is_printed_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut components = example();
        for component in &mut components {
            component.folder = folder.path().join(&component.name);
            std::fs::create_dir(&component.folder).unwrap();
            std::fs::write(component.folder.join("LICENSE-MIT"), "Permission is granted.\r\n")
                .unwrap();
        }
        std::fs::write(folder.path().join("serde/license-apache"), "Apache.\n").unwrap();
        std::fs::write(folder.path().join("serde/README.md"), "Read me.\n").unwrap();
        let text = collect(&components, Some("2.36")).unwrap();
        assert_eq!(text.matches("Permission is granted.").count(), 1);
        assert!(text.contains("derive 1.0.0\nserde 1.0.0\n") && text.contains("Apache.\n"));
        assert!(text.contains("serde 1.0.0: MIT OR Apache-2.0\n"));
        assert!(text.contains("LGPL-2.1-or-later") && !text.contains("Read me."));
        assert!(
            !text.contains("ringfence 1.0.0"),
            "the program's own licence is a file of its own"
        );
    }

    #[test]
    fn crate_without_any_licence_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut components = example();
        for component in &mut components {
            component.folder = folder.path().to_owned();
            component.licence = None;
        }
        assert!(collect(&components, None).unwrap_err().to_string().contains("has no licence"));
    }
}
