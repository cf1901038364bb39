//! File names and media types.

/// Common extensions and their media types, without extensions that have more than one meaning. Of several extensions
/// for one media type the last is the usual one.
const MEDIA_TYPES: [(&str, &str); 25] = [
    ("csv", "text/csv"),
    ("doc", "application/msword"),
    ("docx", "application/vnd.openxmlformats-officedocument.wordprocessingml.document"),
    ("gif", "image/gif"),
    ("htm", "text/html"),
    ("html", "text/html"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("json", "application/json"),
    ("log", "text/plain"),
    ("md", "text/markdown"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("pdf", "application/pdf"),
    ("png", "image/png"),
    ("svg", "image/svg+xml"),
    ("txt", "text/plain"),
    ("wav", "audio/wav"),
    ("webm", "video/webm"),
    ("webp", "image/webp"),
    ("xlsx", "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"),
    ("xml", "application/xml"),
    ("yaml", "application/yaml"),
    ("yml", "application/yaml"),
    ("zip", "application/zip"),
];

/// The media type for the extension of a file name.
pub(crate) fn media_type(name: &str) -> Option<&'static str> {
    let (_, extension) = name.rsplit_once('.')?;
    let mut known = MEDIA_TYPES.iter();
    known.find(|(known, _)| extension.eq_ignore_ascii_case(known)).map(|(_, media_type)| *media_type)
}

/// The usual extension of a media type.
pub(crate) fn extension(media_type: &str) -> Option<&'static str> {
    let mut known = MEDIA_TYPES.iter().rev();
    known.find(|(_, known)| *known == media_type).map(|(extension, _)| *extension)
}

/// The last component of a path in the style of Unix or Windows.
pub(crate) fn last_component(path: &str) -> &str {
    path.rsplit(['/', '\\']).next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_types_go_by_extension_and_back() {
        assert_eq!(media_type("A.JPG"), Some("image/jpeg"));
        assert_eq!(media_type("a"), None);
        assert_eq!(extension("image/jpeg"), Some("jpg"));
        assert_eq!(extension("text/plain"), Some("txt"));
        assert_eq!(extension("x/y"), None);
    }
}
