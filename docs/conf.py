"""How Sphinx builds these pages: make docs."""

project = 'Bevy-JAX'
copyright = 'The Bevy-JAX authors'
extensions = [
  'myst_parser',  # The pages are Markdown, as README.md is.
  'sphinx.ext.autodoc',  # The reference is made of the docstrings.
  'sphinx.ext.napoleon',
  'sphinx.ext.viewcode',  # Every name there leads to its source.
]
html_theme = 'alabaster'
html_theme_options = {
  'description': 'Decode MoE models whose experts do not fit.',
  'fixed_sidebar': True,
  'page_width': '1080px',
}
html_show_sphinx = False
default_role = 'code'
autodoc_member_order = 'bysource'
autodoc_typehints = 'signature'
autodoc_typehints_format = 'short'
autodoc_preserve_defaults = True
autoclass_content = 'class'
napoleon_use_ivar = True
napoleon_use_rtype = False
myst_heading_anchors = 3
python_maximum_signature_line_length = 78
