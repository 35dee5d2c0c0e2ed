//! Bill of materials in CycloneDX 1.5 JSON: every crate of the program and, in a static program, the C library.

use serde_json::{Value, json};

use super::dependencies::Component;

/// Mark of glibc in a program that contains it.
const GLIBC_MARK: &[u8] = b"GNU C Library (";
/// Mark of the version behind [`GLIBC_MARK`].
const VERSION_MARK: &str = " version ";

/// Returns the version of glibc that a program contains, or `None` if it is linked when the program starts.
pub(super) fn glibc_in(program: &[u8]) -> Option<String> {
    let at = program.windows(GLIBC_MARK.len()).position(|window| window == GLIBC_MARK)?;
    let line: Vec<u8> =
        program[at..].iter().copied().take_while(|byte| (b' '..=b'~').contains(byte)).collect();
    let line = String::from_utf8(line).ok()?;
    let version = line.rsplit_once(VERSION_MARK)?.1;
    Some(version.trim_end_matches('.').to_owned())
}

/// Returns the bill of materials. The same components give the same text: it has neither a time nor a serial number.
pub(super) fn render(components: &[Component], glibc: Option<&str>, rust: &str) -> String {
    let is_program = |component: &&Component| component.name == "ringfence";
    let program = components.iter().find(is_program).map(component);
    let mut parts: Vec<Value> =
        components.iter().filter(|one| !is_program(one)).map(component).collect();
    parts.push(system("rust-std", rust, "Apache-2.0 OR MIT", "https://www.rust-lang.org/"));
    if let Some(version) = glibc {
        let site = "https://www.gnu.org/software/libc/";
        parts.push(system("glibc", version, "LGPL-2.1-or-later", site));
    }
    let dependencies: Vec<Value> = components
        .iter()
        .map(|one| {
            let uses = one.uses.iter().filter_map(|at| components.get(*at)).map(Component::purl);
            json!({"ref": one.purl(), "dependsOn": uses.collect::<Vec<_>>()})
        })
        .collect();
    let bom = json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": program},
        "components": parts,
        "dependencies": dependencies,
    });
    format!("{bom:#}\n")
}

fn component(one: &Component) -> Value {
    let kind = if one.name == "ringfence" { "application" } else { "library" };
    let mut value = json!({
        "type": kind,
        "bom-ref": one.purl(),
        "name": one.name,
        "version": one.version,
        "purl": one.purl(),
        // A macro is part of the build, not of the program.
        "scope": if one.is_macro { "excluded" } else { "required" },
    });
    if let Some(description) = &one.description {
        value["description"] = json!(description);
    }
    if let Some(licence) = &one.licence {
        value["licenses"] = json!([{"expression": licence}]);
    }
    if let Some(checksum) = &one.checksum {
        value["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    if let Some(repository) = &one.repository {
        value["externalReferences"] = json!([{"type": "vcs", "url": repository}]);
    }
    value
}

/// Returns a library of the toolchain.
fn system(name: &str, version: &str, licence: &str, site: &str) -> Value {
    json!({
        "type": "library",
        "bom-ref": format!("pkg:generic/{name}@{version}"),
        "name": name,
        "version": version,
        "purl": format!("pkg:generic/{name}@{version}"),
        "scope": "required",
        "licenses": [{"expression": licence}],
        "externalReferences": [{"type": "website", "url": site}],
    })
}

#[cfg(test)]
mod tests {
    use super::super::dependencies::tests::example;
    use super::*;

    #[test]
    fn bill_of_materials_has_components_with_hashes_and_dependencies() {
        let components = example();
        let text = render(&components, Some("2.36"), "1.88.0");
        assert_eq!(text, render(&components, Some("2.36"), "1.88.0"));
        let bom: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&bom["bomFormat"], &bom["specVersion"]), (&json!("CycloneDX"), &json!("1.5")));
        assert_eq!(bom["metadata"]["component"]["name"], "ringfence");
        let names: Vec<&Value> =
            bom["components"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["derive", "serde", "rust-std", "glibc"]);
        assert_eq!(bom["components"][0]["scope"], "excluded");
        assert_eq!(bom["components"][1]["hashes"][0]["content"], "ab");
        assert_eq!(bom["dependencies"][1]["dependsOn"], json!(["pkg:cargo/serde@1.0.0"]));
    }

    #[test]
    fn version_of_glibc_is_that_of_a_static_program() {
        let program =
            b"\x7fELF\0GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\nC\0";
        assert_eq!(glibc_in(program).as_deref(), Some("2.36"));
        assert_eq!(glibc_in(b"\x7fELF\0GLIBC_2.34\0"), None);
    }
}
