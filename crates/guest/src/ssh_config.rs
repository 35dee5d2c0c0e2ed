//! Guest's copies of files that OpenSSH reads by `Include`, for the command of an ordinary user.
//!
//! ssh(1) accepts such a file only from root or its own user ("Bad owner or permissions"). The command's user namespace
//! has one id, so files of the host's root belong to nobody there. The copies belong to the user and are read-only.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use ringfence_sys::namespaces;

use crate::bound_sockets::OVERFLOW_ID;

/// File that OpenSSH accepts from any owner.
const MAIN: &str = "/etc/ssh/ssh_config";
/// Maximum number of copies.
const FILES_MAX: usize = 32;
/// Maximum size of a copy in bytes.
const SIZE_MAX: u64 = 64 << 10;

/// Mounts copies over the included files. One that cannot be copied stays as it is, with a remark.
pub(super) fn copy(scratch: &Path, remarks: &mut Vec<String>) {
    let mut seen = BTreeSet::new();
    let mut waiting = fs::read_to_string(MAIN).map(|text| included(&text)).unwrap_or_default();
    while let Some(path) = waiting.pop() {
        let Ok(path) = fs::canonicalize(path) else { continue };
        if seen.len() >= FILES_MAX || !seen.insert(path.clone()) {
            continue;
        }
        let source = scratch.join(format!("ssh{}", seen.len()));
        match copy_file(&path, &source) {
            Ok(text) => waiting.extend(included(&text)),
            Err(error) => remarks.push(format!("{} stays the host's: {error}", path.display())),
        }
    }
}

/// Mounts a copy over a file of root. Returns the file's text.
fn copy_file(path: &Path, source: &Path) -> io::Result<String> {
    let file = fs::File::open(path)?;
    let metadata = file.metadata()?;
    let mut text = String::new();
    file.take(SIZE_MAX).read_to_string(&mut text)?;
    if metadata.is_file() && metadata.uid() == OVERFLOW_ID && metadata.len() < SIZE_MAX {
        fs::write(source, &text)?;
        rustix::mount::mount_bind(source, path)?;
        namespaces::make_mount_read_only(&CString::new(path.as_os_str().as_bytes())?)?;
    }
    Ok(text)
}

/// Returns the files that a configuration includes, except those of the user's home directory.
fn included(text: &str) -> Vec<PathBuf> {
    let mut found = vec![];
    for line in text.lines() {
        let mut words = line.split([' ', '\t', '=', '"']).filter(|word| !word.is_empty());
        if words.next().is_some_and(|word| word.eq_ignore_ascii_case("include")) {
            for word in words.take_while(|word| !word.starts_with('#')) {
                found.extend(matching(&Path::new("/etc/ssh").join(word)));
            }
        }
    }
    found
}

/// Returns the paths that a pattern stands for: `*.SUFFIX` in the last component, or the path itself.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().map(|name| name.to_string_lossy().into_owned());
    let (Some(directory), Some(name)) = (pattern.parent(), name) else { return vec![] };
    let Some(suffix) = name.strip_prefix('*') else { return vec![pattern.to_owned()] };
    let Ok(entries) = fs::read_dir(directory) else { return vec![] };
    let names = entries.flatten().map(|entry| entry.path());
    names.filter(|path| path.to_string_lossy().ends_with(suffix)).take(FILES_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn included_files_are_those_of_the_patterns() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b.conf", "a.conf", "c.off"] {
            fs::write(directory.path().join(name), "").unwrap();
        }
        let text = format!(
            "# Include /no\n Host x\n\tinclude \"{0}/*.conf\" {0}/c.off # more\nInclude=other\n",
            directory.path().display()
        );
        let mut found = included(&text);
        found.sort();
        let of = |name: &str| directory.path().join(name);
        let mut wanted = vec![of("a.conf"), of("b.conf"), of("c.off"), "/etc/ssh/other".into()];
        wanted.sort();
        assert_eq!(found, wanted);
    }
}
