use super::*;

fn chart() -> BarChart {
    let bar = |name: &str, values: &[f64], published, ours| Bar {
        name: name.to_owned(),
        values: values.to_vec(),
        published,
        ours,
    };
    BarChart {
        id: "rate".to_owned(),
        title: "Rate of <one> queue".to_owned(),
        unit: "Mpps".to_owned(),
        less_is_better: false,
        groups: vec![BarGroup {
            name: "64 bytes".to_owned(),
            bars: vec![
                bar("staging & co", &[3.0, 2.0, 4.0], Some(5.0), true),
                bar("memif", &[2.5], None, false),
            ],
        }],
    }
}

fn lines(points: Vec<(f64, f64)>) -> Plot {
    Plot {
        title: "x < y".into(),
        x: Axis::new("bytes", Scale::Log),
        y: Axis::linear("Mpps"),
        series: vec![Series::new("copy & co", points)],
    }
}

#[test]
fn page_is_self_contained_and_escapes_text() {
    let mut page = Page::new("rates & <ratios>");
    page.heading("a < b");
    page.text("one\n\ntwo");
    page.note("a <busy> machine");
    page.command("Command:", "bench --size <N>");
    page.table("Rates", &["mode", "Mpps"], &[vec!["copy".into(), "<1>".into()]]);
    page.plot(&lines(vec![(64.0, 3.0), (1500.0, 2.0)])).unwrap();
    page.chart(&chart());
    let html = page.finish();
    for text in [
        "rates &amp; &lt;ratios&gt;",
        "a &lt; b",
        "<p>two</p>",
        "&lt;1&gt;",
        "a &lt;busy&gt; machine",
        "--size &lt;N&gt;",
        "staging &amp; co",
        "Rate of &lt;one&gt; queue",
    ] {
        assert!(html.contains(text), "{text}: {html}");
    }
    // Nothing is loaded; the only address is the namespace of SVG.
    let elsewhere = html.replace("http://www.w3.org/2000/svg", "");
    assert!(!elsewhere.contains("http") && !elsewhere.contains("<script"), "{elsewhere}");
    assert!(!html.contains("src=") && !html.contains("url("), "{html}");
    assert!(html.contains("copy &amp; co") && html.contains("x &lt; y"), "{html}");
}

#[test]
fn drawings_are_images_with_own_names_and_descriptions() {
    let mut page = Page::new("t");
    page.plot(&lines(vec![(64.0, 3.0), (1500.0, 2.0)])).unwrap();
    page.chart(&chart());
    let html = page.finish();
    assert_eq!(html.matches("<svg role=\"img\"").count(), 2, "{html}");
    assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
    for id in ["t1", "d1", "t2", "d2"] {
        assert_eq!(html.matches(&format!("id=\"{id}\"")).count(), 1, "{id}: {html}");
        assert_eq!(html.matches(&format!("by=\"{id}\"")).count(), 1, "{id}: {html}");
    }
}

#[test]
fn headings_are_listed_with_links_to_them() {
    let mut page = Page::new("t");
    assert!(!page.finish().contains("<nav"));
    page.heading("Disks");
    page.heading("Uplinks");
    let html = page.finish();
    for (n, name) in [(1, "Disks"), (2, "Uplinks")] {
        assert!(html.contains(&format!("<a href=\"#h{n}\">{name}</a>")), "{html}");
        assert!(html.contains(&format!("<h2 id=\"h{n}\">{name}</h2>")), "{html}");
    }
}

#[test]
fn table_names_its_rows_and_columns_and_facts_have_no_heading() {
    let mut page = Page::new("t");
    page.table("Rates", &["mode", "Mpps"], &[vec!["copy".into(), "1".into()]]);
    let html = page.finish();
    assert!(html.contains("<th scope=\"col\">Mpps</th>"), "{html}");
    assert!(html.contains("<th scope=\"row\">copy</th><td>1</td>"), "{html}");
    assert!(html.contains("<caption>Rates</caption>"), "{html}");
    let mut page = Page::new("t");
    page.facts("Machine", &[vec!["cores".into(), "2".into()]]);
    let html = page.finish();
    assert!(!html.contains("<thead>") && html.contains("<th scope=\"row\">cores</th>"), "{html}");
}

#[test]
fn drawing_without_values_is_omitted() {
    let mut page = Page::new("t");
    page.plot(&lines(Vec::new())).unwrap();
    let mut empty = chart();
    empty.groups[0].bars.iter_mut().for_each(|bar| bar.values.clear());
    page.chart(&empty);
    page.chart(&BarChart { groups: Vec::new(), ..chart() });
    assert!(!page.finish().contains("<svg"));
}

/// Returns the variables of one set of colours in the style.
fn colours(text: &str) -> Vec<(&str, [f64; 3])> {
    let block = text.split_once(":root{").unwrap().1.split_once('}').unwrap().0;
    let variables = block.split(';').filter_map(|part| part.split_once(":#"));
    let parsed = variables.map(|(name, digits)| {
        let digits: String = match digits.len() {
            3 => digits.chars().flat_map(|digit| [digit, digit]).collect(),
            _ => digits.to_owned(),
        };
        let part = |at: usize| f64::from(u8::from_str_radix(&digits[at..at + 2], 16).unwrap());
        (name, [part(0), part(2), part(4)])
    });
    parsed.collect()
}

/// Returns the contrast of two colours as WCAG 2 defines it.
fn contrast(one: [f64; 3], other: [f64; 3]) -> f64 {
    let luminance = |colour: [f64; 3]| {
        let [r, g, b] = colour.map(|part| {
            let part = part / 255.0;
            if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
        });
        0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05
    };
    let (one, other) = (luminance(one), luminance(other));
    one.max(other) / one.min(other)
}

#[test]
fn colours_of_both_schemes_have_enough_contrast() {
    assert!((contrast([0.0; 3], [255.0; 3]) - 21.0).abs() < 1e-9);
    let (light, dark) = STYLE.split_once("prefers-color-scheme:dark").unwrap();
    for scheme in [colours(light), colours(dark)] {
        let of = |name: &str| {
            let found = scheme.iter().find(|(known, _)| known.trim_start_matches("--") == name);
            found.unwrap_or_else(|| panic!("{name} in {scheme:?}")).1
        };
        // Texts need 4.5, parts of drawings 3 (WCAG 2.1, 1.4.3 and 1.4.11).
        for (text, behind, least) in [
            ("text", "back", 7.0),
            ("text", "note", 7.0),
            ("dim", "back", 4.5),
            ("published", "back", 4.5),
            ("link", "back", 4.5),
            ("ours", "back", 3.0),
            ("other", "back", 3.0),
            ("text", "ours", 3.0),
            ("text", "other", 3.0),
        ] {
            let is = contrast(of(text), of(behind));
            assert!(is >= least, "{text} on {behind}: {is:.2}");
        }
    }
}
